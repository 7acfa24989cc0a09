// Ranks as processes that may be killed or stopped: each one's report comes back to the test.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "harness.hpp"

namespace harness {

struct Outcome {
  std::atomic<int> stage{0};  // the rank's progress, for the test to wait for
  std::atomic<bool> ended{false};
  char kind[32] = "";      // of the error it caught
  char message[4000] = "";
};

class Processes {
 public:
  using Body = std::function<void(opensmd::Group&, Outcome&)>;
  static constexpr int kNobody = -1;

  // Rank `absent` never starts.
  Processes(int size, std::chrono::milliseconds timeout, const Body& body, int absent = kNobody,
            opensmd::Waiting waiting = {})
      : size_(size), waiting_(waiting), file_(opensmd::create_arena_file(small_shape(size))),
        outcomes_(static_cast<Outcome*>(mmap(nullptr, sizeof(Outcome) * static_cast<size_t>(size),
                                             PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    for (int i = 0; i < size; ++i) new (&outcomes_[i]) Outcome;
    for (int i = 0; i < size; ++i) pids_.push_back(i == absent ? -1 : start(i, timeout, body));
  }

  ~Processes() {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, SIGKILL);
      if (pid > 0) waitpid(pid, nullptr, 0);
    }
    close(file_.fd);
  }

  Outcome& of(int rank) { return outcomes_[rank]; }
  void signal(int rank, int number) { kill(pids_[static_cast<size_t>(rank)], number); }

  void wait_for_stage(int rank, int stage) {
    wait_until([&] { return of(rank).stage.load() >= stage; }, "rank " + std::to_string(rank) + " never came to stage " +
                                                                   std::to_string(stage) + ": " + of(rank).message);
  }
  void wait_for_end(int rank) {
    wait_until([&] { return of(rank).ended.load(); }, "rank " + std::to_string(rank) + " hangs");
  }
  std::string message(int rank) {
    wait_for_end(rank);
    return std::string(of(rank).kind) + ": " + of(rank).message;
  }

 private:
  template <class Condition>
  void wait_until(const Condition& condition, const std::string& otherwise) {
    for (int i = 0; i < 200000 && !condition(); ++i) usleep(1000);
    CHECK(condition(), otherwise);
  }

  pid_t start(int rank, std::chrono::milliseconds timeout, const Body& body) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a failed check ends the test without running destructors
    Outcome& outcome = outcomes_[rank];
    const auto report = [&outcome](const char* kind, const char* message) {
      std::snprintf(outcome.kind, sizeof(outcome.kind), "%s", kind);
      std::snprintf(outcome.message, sizeof(outcome.message), "%s", message);
    };
    try {
      opensmd::GroupConfig config;
      config.rank = rank;
      config.size = size_;
      config.fd = file_.fd;
      config.timeout = timeout;
      config.waiting = waiting_;
      opensmd::Group group(config);
      body(group, outcome);
    } catch (const opensmd::PeerLost& error) {
      report("PeerLost", error.what());
    } catch (const opensmd::TimedOut& error) {
      report("TimedOut", error.what());
    } catch (const opensmd::Mismatch& error) {
      report("Mismatch", error.what());
    } catch (const opensmd::Aborted& error) {
      report("Aborted", error.what());
    } catch (const std::exception& error) {
      report("other", error.what());
    }
    outcome.ended.store(true);
    // A rank that died or failed must not look as if it had left in good order.
    if (outcome.kind[0] != '\0') pause();
    _exit(0);
  }

  int size_;
  opensmd::Waiting waiting_;
  opensmd::ArenaFile file_;
  Outcome* outcomes_;
  std::vector<pid_t> pids_;
};

}  // namespace harness
