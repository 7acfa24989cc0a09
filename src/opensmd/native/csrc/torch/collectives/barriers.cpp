// The two barriers: barrier, and monitored_barrier, which names the ranks that are missing.
#include <cctype>
#include <utility>

#include "torch/backend.hpp"

namespace opensmd {

namespace {

std::string at_the_beginning(std::string name) {
  name[0] = static_cast<char>(std::toupper(name[0]));
  return name;
}

std::string words_without_time(const std::string& name) {
  return c10::str(at_the_beginning(name), " timed out in monitoredBarrier after 0 ms: the timeout leaves no time to meet");
}

// The words of torch's Gloo, which scripts and torch's own tests look for: rank 0 reports who is missing.
std::string words_of_monitored_barrier(const TimedOut& error, int rank, const std::string& name,
                                       std::chrono::milliseconds timeout, bool wait_all_ranks) {
  if (rank != 0) {
    return c10::str(at_the_beginning(name), " successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0: ");
  }
  const auto& absent = error.absent();
  if (absent.empty()) return "";
  std::string numbers;
  for (const auto& name : absent) {
    if (!numbers.empty() && !wait_all_ranks) break;
    numbers += (numbers.empty() ? "" : ", ") + name.substr(name.rfind(' ') + 1);
  }
  return c10::str(wait_all_ranks ? "Ranks " : "Rank ", numbers, " failed to pass monitoredBarrier in ", timeout.count(),
                  " ms: ");
}

}  // namespace

WorkPtr SmddpBackend::barrier(const c10d::BarrierOptions& opts) {
  // Clients name a device even on hosts that have none; as with Gloo, that means nothing there.
  const bool on_device = at::hasCUDA() && (opts.device ? !opts.device->is_cpu() : !opts.device_ids.empty());
  if (on_device) return device_collectives()->barrier(opts);
  return issue(c10d::OpType::BARRIER, "smddp:barrier", opts.asyncOp, {}, {}, [this, timeout = opts.timeout] {
    transport_->barrier({{}, timeout.count() > 0 ? timeout : timeout_.load()});
  });
}

// The core's barrier names every member that has not arrived, so waiting for all ranks costs nothing more.
void SmddpBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? timeout_.load() : opts.timeout;
  issue(c10d::OpType::BARRIER, "smddp:monitored_barrier", false, {}, {}, [this, timeout, wait_all_ranks] {
    if (timeout.count() <= 0) throw TimedOut(words_without_time(name_));
    try {
      transport_->barrier({"monitored_barrier", timeout});
    } catch (const TimedOut& error) {
      throw TimedOut(words_of_monitored_barrier(error, rank_, name_, timeout, wait_all_ranks) + error.what());
    }
  });
}

}  // namespace opensmd
