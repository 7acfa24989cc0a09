#include "torch/hosts/within.hpp"

#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace opensmd {

std::string within(std::chrono::milliseconds limit, std::function<std::string()> work) {
  auto promise = std::make_shared<std::promise<std::string>>();
  auto answer = promise->get_future();
  std::thread([promise, work = std::move(work)] {
    try {
      promise->set_value(work());
    } catch (...) {
      promise->set_value("");
    }
  }).detach();
  return answer.wait_for(limit) == std::future_status::ready ? answer.get() : "";
}

}  // namespace opensmd
