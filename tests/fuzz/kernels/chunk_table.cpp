// The chunk table: after any calls it is consistent, and answers as a plain model of slots, tiers and keys does.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "chunk_table.h"
#include "input.h"

namespace {

using lmkv::ChunkTable;
using lmkv::Slot;
using lmkv::SlotState;
using Held = std::map<std::pair<Slot, int>, std::set<std::string>>;

constexpr int max_calls = 200;
constexpr std::size_t max_slots = 24;

// Few different keys, so that calls concern the same ones; many of a shard, so that it grows and shrinks.
std::string keys_of(Input& input) {
  std::string keys;
  const auto count = input.number(0, 24);
  const auto first = input.next<std::uint8_t>();
  const auto kind = input.next<std::uint8_t>() % 3;
  for (int index = 0; index < count; ++index) {
    lmkv::ChunkKey key{};
    if (kind == 0) key.head = static_cast<std::uint8_t>(first + index);
    if (kind == 1) key.tail = static_cast<std::uint8_t>(first + index);
    if (kind == 2) key = {0x0123456789abcdefull * (first + index), 0xfedcba9876543210ull * (first + index)};
    keys.append(reinterpret_cast<const char*>(&key), sizeof key);
  }
  return keys;
}

std::vector<std::string> split(const std::string& keys) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < keys.size(); at += 16) parts.push_back(keys.substr(at, 16));
  return parts;
}

class Model {
 public:
  void step(Input& input) {
    const auto act = input.number(0, 9);
    const auto number = input.next<std::uint8_t>();
    const Slot slot = open_.empty() ? lmkv::no_slot : open_[number % open_.size()];
    const int tier = static_cast<int>(number >> 5) % lmkv::tier_count + 1;
    if (act == 0 && open_.size() < max_slots) {
      open_.push_back(table_.open_slot());
    } else if (slot == lmkv::no_slot) {
      return;
    } else if (act == 1) {
      table_.show(slot);
    } else if (act == 2) {
      retire(slot);
    } else if (act <= 5) {
      admit(input, slot, tier);
    } else if (act == 6) {
      evict(slot, tier, keys_of(input));
    } else if (act == 7) {
      sweep(number + 1);
    } else {
      look(input, slot, tier);
    }
  }

  void check() {
    const std::string problem = table_.check();
    if (!problem.empty()) std::fprintf(stderr, "%s\n", problem.c_str());
    PROMISE(problem.empty());
  }

  // Everything leaves: nothing stays.
  void end() {
    while (!open_.empty()) retire(open_.back());
    while (table_.sweep(1 << 20)) {
    }
    while (table_.sweep(1 << 20)) {
    }
    check();
    PROMISE(table_.size() == 0);
    PROMISE(table_.set_count() == 0);
  }

 private:
  void retire(Slot slot) {
    table_.retire(slot);
    std::erase(open_, slot);
    for (int tier = 1; tier <= lmkv::tier_count; ++tier) held_.erase({slot, tier});
  }

  void admit(Input& input, Slot slot, int tier) {
    const std::string fingerprint(1, static_cast<char>(input.next<std::uint8_t>() % 4));
    const std::string keys = keys_of(input);
    std::vector<std::pair<std::uint32_t, std::uint32_t>> partials;
    const auto count = static_cast<std::uint32_t>(keys.size() / 16);
    for (std::uint32_t index = 0; index < count; ++index) {
      if (input.next<std::uint8_t>() % 8 == 7) partials.emplace_back(index, index + 1);
    }
    if (keys.empty()) return;
    const auto spec = table_.spec_of(fingerprint);
    PROMISE(spec < lmkv::max_specs);
    std::string expected;
    auto& own = held_[{slot, tier}];
    for (const auto& key : split(keys)) {
      if (own.insert(key).second) expected += key;
    }
    PROMISE(table_.admit(slot, tier, spec, 16, keys, partials) == expected);
  }

  void evict(Slot slot, int tier, const std::string& keys) {
    std::string expected;
    auto& own = held_[{slot, tier}];
    for (const auto& key : split(keys)) {
      if (own.erase(key) > 0) expected += key;
    }
    PROMISE(table_.evict(slot, tier, keys) == expected);
  }

  // A sweep changes nothing that a lookup sees.
  void sweep(std::size_t limit) {
    table_.sweep(limit);
    for (const Slot slot : open_) {
      for (int tier = 1; tier <= lmkv::tier_count; ++tier) {
        for (const auto& key : held_[{slot, tier}]) {
          PROMISE(table_.held(slot, lmkv::holder_of(0, tier), key) == std::string(1, '\1'));
        }
      }
    }
  }

  bool has(Slot slot, const std::string& key) {
    for (int tier = 1; tier <= lmkv::tier_count; ++tier) {
      if (held_[{slot, tier}].contains(key)) return true;
    }
    return false;
  }

  void look(Input& input, Slot excluded, int tier) {
    const std::string keys = keys_of(input);
    const auto parts = split(keys);
    std::size_t found = 0;
    for (const auto& match : table_.lookup(keys, excluded)) {
      PROMISE(match.slot != excluded);
      PROMISE(table_.state(match.slot) == SlotState::live);
      std::size_t length = 0;
      while (length < parts.size() && has(match.slot, parts[length])) ++length;
      PROMISE(match.chunk_count == length);
      std::uint64_t in_runs = 0;
      for (const auto& run : match.runs) in_runs += run.chunk_count;
      PROMISE(in_runs == length);
      ++found;
    }
    std::size_t expected = 0;
    for (const Slot slot : open_) {
      expected += slot != excluded && table_.state(slot) == SlotState::live && !parts.empty() && has(slot, parts[0]);
    }
    PROMISE(found == expected);
    std::size_t prefix = 0;
    while (prefix < parts.size() && held_[{excluded, tier}].contains(parts[prefix])) ++prefix;
    PROMISE(table_.match_at(excluded, lmkv::holder_of(0, tier), keys).chunk_count == prefix);
    std::size_t cursor = 0, count = 0, in_model = 0;
    do {
      for (const auto& part : table_.scan(cursor, 1 << 16)) count += part.keys.size() / 16;
    } while (cursor != 0);
    for (const auto& [place, own] : held_) in_model += table_.state(place.first) == SlotState::live ? own.size() : 0;
    PROMISE(count == in_model);
    for (const auto& key : parts) table_.fingerprint_of(key);
  }

  ChunkTable table_;
  std::vector<Slot> open_;
  Held held_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Model model;
  for (int call = 0; call < max_calls && !input.is_empty(); ++call) model.step(input);
  model.check();
  model.end();
  return 0;
}
