// All members of a group that spans hosts compare their calls before they move data, as the members of one host do in
// shared memory (core/protocol/round.hpp): Gloo itself gives wrong numbers, waits for ever or ends the process.
//
//      host A                         host B
//      rank 0  <── signatures ──>     rank 2        1. every host compares in shared memory
//      rank 1                         rank 3
//      rank 0  <════ frame ═════>     rank 2        2. their first members exchange what their hosts call,
//                                                      and with it the data of small sums
//      rank 0  ──── verdict ───>      rank 2 ──>    3. they tell their hosts
//      rank 1                         rank 3
//
// Without shared memory every member is a host of its own here.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/protocol/record.hpp"
#include "torch/hosts/links.hpp"

namespace opensmd {

// "all_reduce(sum, float32, count=4) shape [4]"
std::string describe(const Signature& signature, std::string_view text);

class Agreement {
 public:
  // `island`: of the members on this host; null where no two members share one. `links`: among the first members of
  // the hosts; none on other members. `name`: of this member, for messages.
  Agreement(std::shared_ptr<Group> island, std::optional<Links> links, std::string name, int hosts);

  // Throws Mismatch, the same on all members, unless all of them make the same call. No member returns before all
  // others have called it.
  void check(const Signature& signature, const Call& call);

  // Whether so many bytes of a sum are better sent with the comparison than after it.
  bool carries(size_t bytes) const { return bytes <= payload_bytes_; }

  void abort();
  void leave();

  class Comparison;

 private:
  std::shared_ptr<Group> island_;
  std::optional<Links> links_;
  const std::string name_;
  const int hosts_;
  const size_t payload_bytes_;
};

// The steps of one check, for who has something to do between them.
class Agreement::Comparison {
 public:
  Comparison(Agreement& owner, const Signature& signature, const Call& call);  // 1.

  bool agreed_here() const { return agreed_; }
  int hosts() const { return owner_.hosts_; }
  // 2. On first members, nothing on others. `payload` may hold as much as the agreement carries.
  void post(const void* payload = nullptr, size_t bytes = 0, double factor = 1.0);
  void conclude();  // 3.

  // On first members, after 3.
  const void* payload(int host) const;
  double factor(int host) const;

 private:
  struct Header {
    uint64_t signature;
    uint64_t agreed;  // by the members of this host
    double factor;
  };

  const Header& header(int host) const;
  milliseconds time_left() const;
  Call later() const;
  std::string collected_calls();
  [[noreturn]] void raise();

  Agreement& owner_;
  const Signature& signature_;
  const Call& call_;
  const uint64_t start_ns_;
  bool agreed_ = true;
};

}  // namespace opensmd
