// Interned sets of holders: equal sets exist once and have one id, which adjacent chunks share.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace lmkv {

// The id of a set. Valid while it is retained, and until the next `collect`.
using SetId = std::uint32_t;
inline constexpr SetId no_holders = 0;

// One slot and the tiers in which it holds a chunk: slot << 4 | one bit per tier, the fastest lowest.
using Holder = std::uint32_t;
inline constexpr int tier_count = 4;
inline constexpr Holder all_tiers = (1u << tier_count) - 1;

constexpr std::uint32_t slot_of(Holder holder) { return holder >> tier_count; }
constexpr Holder holder_of(std::uint32_t slot, int tier) { return slot << tier_count | 1u << (tier - 1); }

class HolderSets {
 public:
  HolderSets();

  // Holders in order of their slots, each slot once. Valid until the next call that is not const.
  std::span<const Holder> operator[](SetId id) const { return sets_[id].holders; }

  // The set of these sorted holders; `no_holders` if there are none.
  SetId intern(std::span<const Holder> holders);

  void retain(SetId id, std::uint32_t times = 1) { sets_[id].retained += times; }
  void release(SetId id);

  // Frees the sets that are not retained. Ids stay valid until then.
  void collect();

  // The number of sets, without the empty one.
  std::size_t size() const { return size_; }
  std::uint32_t retained(SetId id) const { return sets_[id].retained; }

 private:
  struct Set {
    std::vector<Holder> holders;
    std::uint32_t retained = 0;
    std::uint32_t hash = 0;
    SetId next = no_holders;  // in its bucket
  };

  void unlink(SetId id);

  std::deque<Set> sets_;        // a deque never moves them: no pause when it grows
  std::vector<SetId> buckets_;  // as many for ever, for the same reason; a chain is short until there are millions
  std::vector<SetId> free_;
  std::vector<SetId> idle_;  // perhaps not retained; may be here twice
  std::size_t size_ = 0;
};

}  // namespace lmkv
