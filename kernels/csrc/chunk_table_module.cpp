// Python bindings of the chunk table. Invalid arguments raise ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "chunk_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using lmkv::ChunkTable;
using lmkv::Slot;
using Partials = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

std::string_view text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

std::string_view keys_of(const nb::bytes& keys) {
  if (keys.size() % sizeof(lmkv::ChunkKey)) throw std::invalid_argument("keys must be 16 bytes each");
  return text_of(keys);
}

// Usually all keys have changed, and no copy is made.
nb::bytes changed_of(const nb::bytes& keys, const std::string& changed) {
  return changed.size() == keys.size() ? keys : bytes_of(changed);
}

void check_slot(const ChunkTable& table, Slot slot) {
  if (slot >= table.slot_count()) throw std::invalid_argument("there is no such slot");
}

void check_open(const ChunkTable& table, Slot slot) {
  check_slot(table, slot);
  const lmkv::SlotState state = table.state(slot);
  if (state != lmkv::SlotState::staged && state != lmkv::SlotState::live) {
    throw std::invalid_argument("the slot is not open");
  }
}

void check_place(const ChunkTable& table, Slot slot, int tier) {
  check_open(table, slot);
  if (tier < 1 || tier > lmkv::tier_count) throw std::invalid_argument("there is no such tier");
}

lmkv::Holder tiers_of(int tier) {
  if (tier < 0 || tier > lmkv::tier_count) throw std::invalid_argument("there is no such tier");
  return tier == 0 ? lmkv::all_tiers : lmkv::holder_of(0, tier);
}

nb::bytes admit(ChunkTable& table, Slot slot, int tier, const nb::bytes& fingerprint, std::uint32_t tokens,
                const nb::bytes& keys, const Partials& partials) {
  check_place(table, slot, tier);
  const std::string_view packed = keys_of(keys);
  const std::size_t count = packed.size() / sizeof(lmkv::ChunkKey);
  std::size_t next = 0;
  for (const auto& [index, own_tokens] : partials) {
    if (index < next || index >= count) throw std::invalid_argument("partials must be in order, among the keys");
    if (own_tokens > lmkv::max_tokens) throw std::invalid_argument("a chunk has too many tokens");
    next = index + 1;
  }
  if (tokens > lmkv::max_tokens) throw std::invalid_argument("a chunk has too many tokens");
  if (count == 0) return keys;
  const lmkv::SpecId spec = table.spec_of(text_of(fingerprint));
  if (spec == lmkv::max_specs) throw std::overflow_error("there are chunks of too many specs");
  return changed_of(keys, table.admit(slot, tier, spec, tokens, packed, partials));
}

nb::bytes evict(ChunkTable& table, Slot slot, int tier, const nb::bytes& keys) {
  check_place(table, slot, tier);
  return changed_of(keys, table.evict(slot, tier, keys_of(keys)));
}

nb::list lookup(const ChunkTable& table, const nb::bytes& keys, std::int64_t excluded) {
  nb::list matches;
  for (const lmkv::Match& match : table.lookup(keys_of(keys), excluded < 0 ? lmkv::no_slot : Slot(excluded))) {
    nb::list runs;
    for (const lmkv::Run& run : match.runs) runs.append(nb::make_tuple(run.tier, run.chunk_count, run.token_count));
    matches.append(nb::make_tuple(match.slot, match.chunk_count, match.token_count, runs));
  }
  return matches;
}

std::pair<std::uint64_t, std::uint64_t> match_at(const ChunkTable& table, Slot slot, int tier, const nb::bytes& keys) {
  check_slot(table, slot);
  const lmkv::Run run = table.match_at(slot, tiers_of(tier), keys_of(keys));
  return {run.chunk_count, run.token_count};
}

nb::bytes held(const ChunkTable& table, Slot slot, int tier, const nb::bytes& keys) {
  check_slot(table, slot);
  return bytes_of(table.held(slot, tiers_of(tier), keys_of(keys)));
}

nb::object fingerprint_of(const ChunkTable& table, const nb::bytes& key) {
  const std::string* const fingerprint = table.fingerprint_of(keys_of(key));
  return fingerprint ? nb::object(bytes_of(*fingerprint)) : nb::none();
}

nb::tuple scan(const ChunkTable& table, std::size_t cursor, std::size_t limit) {
  nb::list parts;
  for (const lmkv::Part& part : table.scan(cursor, limit)) {
    parts.append(nb::make_tuple(part.slot, part.tier, bytes_of(table.fingerprint(part.spec)), bytes_of(part.keys)));
  }
  return nb::make_tuple(cursor, parts);
}

nb::list holdings(const ChunkTable& table, Slot slot) {
  check_slot(table, slot);
  nb::list held;
  for (const lmkv::Holding& one : table.holdings(slot)) {
    held.append(nb::make_tuple(one.tier, bytes_of(table.fingerprint(one.spec)), one.chunk_count, one.key_sum));
  }
  return held;
}

void show(ChunkTable& table, Slot slot) {
  check_open(table, slot);
  table.show(slot);
}

void retire(ChunkTable& table, Slot slot) {
  check_open(table, slot);
  table.retire(slot);
}

void check(const ChunkTable& table) {
  if (const std::string problem = table.check(); !problem.empty()) {
    PyErr_SetString(PyExc_AssertionError, problem.c_str());
    throw nb::python_error();
  }
}

}  // namespace

NB_MODULE(_chunk_table, module) {
  module.doc() = "Which slot holds which chunk in which tier: the coordinator's layout map without its names.";
  nb::class_<ChunkTable> table(module, "ChunkTable");
  table.attr("MAX_TOKENS") = lmkv::max_tokens;
  table.attr("MAX_SPECS") = lmkv::max_specs;
  table.attr("TIER_COUNT") = lmkv::tier_count;
  table.def(nb::init<>())
      .def("__len__", &ChunkTable::size)
      .def_prop_ro("slot_count", &ChunkTable::slot_count)
      .def_prop_ro("set_count", &ChunkTable::set_count)
      .def("open_slot", &ChunkTable::open_slot)
      .def("show", &show, "slot"_a)
      .def("retire", &retire, "slot"_a)
      .def("admit", &admit, "slot"_a, "tier"_a, "fingerprint"_a, "tokens"_a, "keys"_a, "partials"_a = Partials())
      .def("evict", &evict, "slot"_a, "tier"_a, "keys"_a)
      .def("sweep", &ChunkTable::sweep, "limit"_a)
      .def("lookup", &lookup, "keys"_a, "excluded"_a = -1)
      .def("match_at", &match_at, "slot"_a, "tier"_a, "keys"_a)
      .def("held", &held, "slot"_a, "tier"_a, "keys"_a)
      .def("fingerprint_of", &fingerprint_of, "key"_a)
      .def("scan", &scan, "cursor"_a, "limit"_a)
      .def("holdings", &holdings, "slot"_a)
      .def("check", &check);
}
