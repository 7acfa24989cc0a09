#include "torch/hosts/agreement.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/memory/arena.hpp"
#include "core/protocol/clock.hpp"
#include "core/protocol/context.hpp"

namespace opensmd {
namespace {

// Two hosts that send each other their whole sums send no more than a ring does, and in one step; with more hosts it is
// more, but worth the steps that it saves, up to so many bytes to all others together.
constexpr size_t kMostToOne = 512u << 10;
constexpr size_t kMostToSeveral = 128u << 10;
// What goes through one round of a host's members with the verdict is copied once more, which costs less than a round up
// to here.
constexpr size_t kMostTogether = 128u << 10;
constexpr size_t kLineBytes = 256;         // of a member's name and call
constexpr size_t kHostsLines = 16u << 10;  // of those of a host
// Who waits for its first member to hear from other hosts waits longer than that does.
constexpr milliseconds kGrace{2000};
constexpr size_t kHeaderWords = 4;

size_t most_payload(int hosts) {
  return hosts <= 2 ? kMostToOne : kMostToSeveral / static_cast<size_t>(hosts - 1) / kLine * kLine;
}

size_t frame_bytes(size_t payload_bytes) {
  return std::max(kHeaderWords * sizeof(uint64_t) + payload_bytes, kHostsLines);
}

struct Caller {
  std::string call;
  std::vector<std::string> names;
};

// Lines of "name\tcall".
void add_callers(std::vector<Caller>& all, std::string_view lines) {
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    const size_t tab = lines.substr(0, end).find('\t');
    if (tab != std::string_view::npos) {
      const std::string name(lines.substr(0, tab)), call(lines.substr(tab + 1, end - tab - 1));
      auto found = std::find_if(all.begin(), all.end(), [&](const Caller& each) { return each.call == call; });
      if (found == all.end()) found = all.insert(found, Caller{call, {}});
      found->names.push_back(name);
    }
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
}

std::string sentence(const std::vector<Caller>& all) {
  std::string words;
  for (const auto& each : all) words += (words.empty() ? "" : "; ") + join_names(each.names) + " called " + each.call;
  return words;
}

}  // namespace

std::string describe(const Signature& signature, std::string_view text) {
  RecordEntry entry;
  entry.operation = signature.operation;
  entry.dtype = signature.dtype;
  entry.reduction = signature.reduction;
  entry.root = signature.root;
  entry.count = signature.count;
  entry.text = text;
  return entry.describe();
}

Agreement::Agreement(std::shared_ptr<Local> local, c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> firsts,
                     const std::vector<std::string>& names)
    : local_(std::move(local)),
      name_(names[static_cast<size_t>(gloo->getRank())]),
      hosts_(static_cast<int>(firsts.size())),
      payload_bytes_(most_payload(hosts_)) {
  if (local_->rank() != 0) return;
  std::vector<std::string> names_of_firsts;
  for (int member : firsts) names_of_firsts.push_back(names[static_cast<size_t>(member)]);
  links_.emplace(std::move(gloo), std::move(firsts), std::move(names_of_firsts), frame_bytes(payload_bytes_));
}

void Agreement::check(const Signature& signature, const Call& call) {
  Comparison comparison(*this, signature, call);
  comparison.post();
  comparison.conclude();
}

Agreement::Comparison::Comparison(Agreement& owner, const Signature& signature, const Call& call, uint64_t detail)
    : owner_(owner), signature_(signature), call_(call), detail_(detail), start_ns_(now_ns()) {
  if (owner_.local_->alone()) return;
  using Words = std::array<uint64_t, 2>;
  const Words own{signature_.hash(), detail};
  std::vector<Words> all(static_cast<size_t>(owner_.local_->size()));
  std::vector<void*> outs;
  for (auto& words : all) outs.push_back(words.data());
  const std::vector<size_t> counts(all.size(), own.size());
  owner_.local_->all_gather(own.data(), outs.data(), counts.data(), DType::U64, call_);
  for (const auto& words : all) {
    agreed_ = agreed_ && words[0] == own[0];
    same_detail_ = same_detail_ && words[1] == own[1];
  }
}

std::byte* Agreement::Comparison::payload_for(int host) { return owner_.links_->outgoing(host) + sizeof(Header); }

void Agreement::Comparison::post(const std::vector<size_t>& bytes) {
  if (!first()) return;
  const Header header{signature_.hash(), agreed_, same_detail_, detail_};
  std::vector<size_t> sizes(static_cast<size_t>(owner_.hosts_), sizeof(Header));
  for (int host = 0; host < owner_.hosts_; ++host) {
    std::memcpy(owner_.links_->outgoing(host), &header, sizeof(header));
    if (!bytes.empty()) sizes[static_cast<size_t>(host)] += bytes[static_cast<size_t>(host)];
  }
  owner_.links_->post(sizes);
}

void Agreement::Comparison::post_to_all(size_t bytes) {
  if (!first()) return;
  const int own = owner_.links_->own();
  for (int host = 0; host < owner_.hosts_; ++host) {
    if (host != own && bytes > 0) std::memcpy(payload_for(host), payload_for(own), bytes);
  }
  post(std::vector<size_t>(static_cast<size_t>(owner_.hosts_), bytes));
}

const Agreement::Comparison::Header& Agreement::Comparison::header(int host) {
  return *reinterpret_cast<const Header*>(owner_.links_->frame(host));
}

const std::byte* Agreement::Comparison::payload(int host) { return owner_.links_->frame(host) + sizeof(Header); }

milliseconds Agreement::Comparison::time_left() const {
  const milliseconds used(static_cast<int64_t>((now_ns() - start_ns_) / 1000000u));
  return std::max(call_.timeout - used, milliseconds{1});
}

Call Agreement::Comparison::later() const { return {call_.text, time_left() + kGrace}; }

void Agreement::Comparison::conclude() {
  hear();
  tell_here(nullptr, 0);
}

void Agreement::Comparison::hear() {
  verdict_ = {agreed_, same_detail_};
  if (!first()) return;
  owner_.links_->wait(time_left());
  for (int host = 0; host < owner_.hosts_; ++host) {
    const Header& theirs = header(host);
    verdict_[0] = verdict_[0] && theirs.agreed && theirs.signature == signature_.hash();
    verdict_[1] = verdict_[1] && theirs.same_detail && theirs.detail == detail_;
  }
  same_detail_ = verdict_[1] != 0;
}

std::byte* Agreement::Comparison::together(size_t bytes) {
  if (!agreed_ || bytes == 0 || bytes > kMostTogether || owner_.local_->alone()) return nullptr;
  together_ = std::make_unique_for_overwrite<std::byte[]>(sizeof(verdict_) + bytes);
  return together_.get();
}

void Agreement::Comparison::tell_here(std::byte* together, size_t bytes) {
  if (together) {
    std::memcpy(together, verdict_.data(), sizeof(verdict_));
    owner_.local_->broadcast(together, sizeof(verdict_) + bytes, DType::U8, 0, later());
    std::memcpy(verdict_.data(), together, sizeof(verdict_));
  } else {
    owner_.local_->broadcast(verdict_.data(), verdict_.size(), DType::U64, 0, later());
  }
  same_detail_ = verdict_[1] != 0;
  if (!verdict_[0]) raise();
}

// This member's line, and on first members those of all others of the host.
std::string Agreement::Comparison::collected_calls() {
  std::string own = owner_.name_ + "\t" + describe(signature_, call_.text) + "\n";
  own.resize(std::min(own.size(), kLineBytes));
  own.resize(kLineBytes);
  const auto size = static_cast<size_t>(owner_.local_->size());
  std::string all(size * kLineBytes, '\0');
  std::vector<void*> outs;
  for (size_t i = 0; i < size; ++i) outs.push_back(all.data() + i * kLineBytes);
  const std::vector<size_t> counts(size, kLineBytes);
  owner_.local_->all_gather(own.data(), outs.data(), counts.data(), DType::U8, later());
  all.erase(std::remove(all.begin(), all.end(), '\0'), all.end());
  return all;
}

// All members come here together, because all know of the same disagreement.
void Agreement::Comparison::raise() {
  const std::string own = collected_calls();
  std::string words(kHostsLines, '\0');
  if (first()) {
    auto& links = *owner_.links_;
    const size_t length = std::min(own.size(), kHostsLines - 1) + 1;  // with the end of the text
    for (int host = 0; host < owner_.hosts_; ++host) {
      std::memcpy(links.outgoing(host), own.data(), length - 1);
      links.outgoing(host)[length - 1] = std::byte{0};
    }
    links.post(std::vector<size_t>(static_cast<size_t>(owner_.hosts_), length));
    links.wait(time_left());
    std::vector<Caller> callers;
    for (int host = 0; host < owner_.hosts_; ++host) {
      add_callers(callers, reinterpret_cast<const char*>(links.frame(host)));
    }
    const std::string all = sentence(callers);
    words.replace(0, std::min(all.size(), kHostsLines - 1), all, 0, kHostsLines - 1);
    words.resize(kHostsLines);
  }
  owner_.local_->broadcast(words.data(), kHostsLines, DType::U8, 0, later());
  throw Mismatch(std::string("the ranks of the group made different calls: ") + words.c_str() +
                 ". All must call the same operations with the same sizes in the same order");
}

}  // namespace opensmd
