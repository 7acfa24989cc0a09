// All members of a group that spans hosts compare their calls before they move data, as the members of one host do in
// shared memory (core/protocol/round.hpp): Gloo itself gives wrong numbers, waits for ever or ends the process.
//
//      host A                         host B
//      rank 0  <── signatures ──>     rank 2        1. every host compares in shared memory
//      rank 1                         rank 3
//      rank 0  <════ frame ═════>     rank 2        2. their first members exchange what their hosts call,
//                                                      and with it the data of small calls
//      rank 0  ──── verdict ───>      rank 2 ──>    3. they tell their hosts
//      rank 1                         rank 3
//
// Without shared memory every member is a host of its own here.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/protocol/record.hpp"
#include "torch/hosts/links.hpp"
#include "torch/hosts/local.hpp"

namespace opensmd {

// "all_reduce(sum, float32, count=4) shape [4]"
std::string describe(const Signature& signature, std::string_view text);

class Agreement {
 public:
  // `firsts`: the first members of all hosts, by whom `gloo` calls them. `names`: of all members, for messages.
  Agreement(std::shared_ptr<Local> local, c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> firsts,
            const std::vector<std::string>& names);

  // Throws Mismatch, the same on all members, unless all of them make the same call. No member returns before all
  // others have called it.
  void check(const Signature& signature, const Call& call);

  // Whether so many bytes from one host to another are better sent with the comparison than after it.
  bool carries(size_t bytes) const { return bytes <= payload_bytes_; }

  class Comparison;

 private:
  const std::shared_ptr<Local> local_;
  const std::string name_;
  const int hosts_;
  const size_t payload_bytes_;
  std::optional<Links> links_;  // on first members
};

// The steps of one check, for who has something to do between them.
class Agreement::Comparison {
 public:
  // 1. `detail` may differ between members; same_detail() says whether it does.
  Comparison(Agreement& owner, const Signature& signature, const Call& call, uint64_t detail = 0);

  bool agreed_here() const { return agreed_; }
  bool first() const { return owner_.links_.has_value(); }
  // On first members: where the payload for a host is to be written, as much as the agreement carries.
  std::byte* payload_for(int host);
  // 2. On first members, nothing on others. So many bytes of the payload for each host; none by default.
  void post(const std::vector<size_t>& bytes = {});
  // Likewise, but all hosts get the bytes that were written for this one.
  void post_to_all(size_t bytes);
  void conclude();  // 3.
  // Likewise. And where all agree, all members of this host then have `bytes` at `data`, which fill(where) writes on the
  // first one, out of what has come: few of them in the same round as the verdict. `keeps`: this member has them, and
  // its `data` may not be written to.
  template <typename Fill>
  void conclude(void* data, size_t bytes, Fill fill, bool keeps = false);
  bool same_detail() const { return same_detail_; }  // of all members, after 3; before it, of those of this host

  // On first members, after 3: what came from a host, or was written for this one.
  const std::byte* payload(int host);

 private:
  struct Header {
    uint64_t signature;
    uint64_t agreed;  // by the members of this host
    uint64_t same_detail;
    uint64_t detail;
  };

  const Header& header(int host);
  // Where the agreement's word and so many bytes are to be laid to go through one round; null where they are too many,
  // or the members here do not even agree on how many they are.
  std::byte* together(size_t bytes);
  void hear();  // on first members, from the others
  void tell_here(std::byte* together, size_t bytes);
  milliseconds time_left() const;
  Call later() const;
  std::string collected_calls();
  [[noreturn]] void raise();

  Agreement& owner_;
  const Signature& signature_;
  const Call& call_;
  const uint64_t detail_;
  const uint64_t start_ns_;
  bool agreed_ = true;
  bool same_detail_ = true;
  std::array<uint64_t, 2> verdict_{};  // of all hosts: whether they agree, and in their details
  std::unique_ptr<std::byte[]> together_;
};

template <typename Fill>
void Agreement::Comparison::conclude(void* data, size_t bytes, Fill fill, bool keeps) {
  hear();
  std::byte* joined = together(bytes);
  std::byte* at = joined ? joined + sizeof(verdict_) : static_cast<std::byte*>(data);
  if (first() && verdict_[0] && bytes > 0 && !(keeps && at == data)) fill(at);
  tell_here(joined, bytes);
  if (bytes == 0) return;
  if (!joined) {
    owner_.local_->broadcast(data, bytes, DType::U8, 0, later());
  } else if (!keeps) {
    std::memcpy(data, at, bytes);
  }
}

}  // namespace opensmd
