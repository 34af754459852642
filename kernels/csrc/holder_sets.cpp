#include "holder_sets.h"

#include <algorithm>

namespace lmkv {
namespace {

constexpr std::size_t bucket_count = 1 << 16;

std::uint32_t hash_of(std::span<const Holder> holders) {
  std::uint64_t hash = holders.size();
  for (const Holder holder : holders) hash = (hash ^ holder) * 0x9E3779B97F4A7C15u;
  return static_cast<std::uint32_t>(hash >> 32);
}

}  // namespace

HolderSets::HolderSets() : sets_(1), buckets_(bucket_count, no_holders) {}

SetId HolderSets::intern(std::span<const Holder> holders) {
  if (holders.empty()) return no_holders;
  const std::uint32_t hash = hash_of(holders);
  SetId& bucket = buckets_[hash % bucket_count];
  for (SetId id = bucket; id != no_holders; id = sets_[id].next) {
    if (sets_[id].hash == hash && std::ranges::equal(sets_[id].holders, holders)) return id;
  }
  SetId id = static_cast<SetId>(sets_.size());
  if (free_.empty()) {
    sets_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  sets_[id] = {{holders.begin(), holders.end()}, 0, hash, bucket};
  bucket = id;
  idle_.push_back(id);
  ++size_;
  return id;
}

void HolderSets::release(SetId id) {
  if (--sets_[id].retained == 0) idle_.push_back(id);
}

void HolderSets::collect() {
  for (const SetId id : idle_) {
    if (sets_[id].retained > 0 || sets_[id].holders.empty()) continue;
    unlink(id);
    sets_[id] = {};
    free_.push_back(id);
    --size_;
  }
  idle_.clear();
}

void HolderSets::unlink(SetId id) {
  SetId* link = &buckets_[sets_[id].hash % bucket_count];
  while (*link != id) link = &sets_[*link].next;
  *link = sets_[id].next;
}

}  // namespace lmkv
