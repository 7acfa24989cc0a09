#include "torch/hosts/agreement.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/protocol/clock.hpp"
#include "core/protocol/context.hpp"

namespace opensmd {
namespace {

// Two hosts that send each other their whole sums send no more than a ring does, and in one step; with more hosts it is
// more, but worth the steps that it saves, up to so many bytes to all others together.
constexpr size_t kMostToOne = 512u << 10;
constexpr size_t kMostToSeveral = 128u << 10;
constexpr size_t kLineBytes = 256;         // of a member's name and call
constexpr size_t kHostsLines = 16u << 10;  // of those of a host
// Who waits for its first member to hear from other hosts waits longer than that does.
constexpr milliseconds kGrace{2000};

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

Agreement::Agreement(std::shared_ptr<Group> island, std::optional<Links> links, std::string name, int hosts)
    : island_(std::move(island)),
      links_(std::move(links)),
      name_(std::move(name)),
      hosts_(hosts),
      payload_bytes_(hosts <= 2 ? kMostToOne : kMostToSeveral / static_cast<size_t>(hosts - 1)) {}

void Agreement::check(const Signature& signature, const Call& call) {
  Comparison comparison(*this, signature, call);
  comparison.post();
  comparison.conclude();
}

void Agreement::abort() {
  if (links_) links_->abort();
}

void Agreement::leave() {
  if (links_) links_->leave();
}

Agreement::Comparison::Comparison(Agreement& owner, const Signature& signature, const Call& call)
    : owner_(owner), signature_(signature), call_(call), start_ns_(now_ns()) {
  if (!owner_.island_) return;
  const uint64_t own = signature_.hash();
  std::vector<uint64_t> all(static_cast<size_t>(owner_.island_->size()));
  std::vector<void*> outs;
  for (auto& each : all) outs.push_back(&each);
  const std::vector<size_t> ones(all.size(), 1);
  owner_.island_->all_gather(&own, outs.data(), ones.data(), DType::U64, call_);
  agreed_ = std::all_of(all.begin(), all.end(), [own](uint64_t each) { return each == own; });
}

void Agreement::Comparison::post(const void* payload, size_t bytes, double factor) {
  if (!owner_.links_) return;
  std::byte* frame = owner_.links_->prepare(sizeof(Header) + owner_.payload_bytes_);
  const Header header{signature_.hash(), agreed_, factor};
  std::memcpy(frame, &header, sizeof(header));
  if (bytes > 0) std::memcpy(frame + sizeof(header), payload, bytes);
  owner_.links_->post(sizeof(Header) + bytes);
}

const Agreement::Comparison::Header& Agreement::Comparison::header(int host) const {
  return *reinterpret_cast<const Header*>(owner_.links_->frame(host));
}

const void* Agreement::Comparison::payload(int host) const { return owner_.links_->frame(host) + sizeof(Header); }

double Agreement::Comparison::factor(int host) const { return header(host).factor; }

milliseconds Agreement::Comparison::time_left() const {
  const milliseconds used(static_cast<int64_t>((now_ns() - start_ns_) / 1000000u));
  return std::max(call_.timeout - used, milliseconds{1});
}

Call Agreement::Comparison::later() const { return {call_.text, time_left() + kGrace}; }

void Agreement::Comparison::conclude() {
  uint64_t agreed = agreed_;
  if (owner_.links_) {
    owner_.links_->wait(time_left());
    for (int host = 0; host < owner_.links_->size(); ++host) {
      agreed = agreed && header(host).agreed && header(host).signature == signature_.hash();
    }
  }
  if (owner_.island_ && owner_.island_->size() > 1) owner_.island_->broadcast(&agreed, 1, DType::U64, 0, later());
  if (!agreed) raise();
}

// This member's line, and on first members those of all others of the host.
std::string Agreement::Comparison::collected_calls() {
  std::string own = owner_.name_ + "\t" + describe(signature_, call_.text) + "\n";
  own.resize(std::min(own.size(), kLineBytes));
  if (!owner_.island_) return own;
  own.resize(kLineBytes);
  const auto size = static_cast<size_t>(owner_.island_->size());
  std::string all(size * kLineBytes, '\0');
  std::vector<void*> outs;
  for (size_t i = 0; i < size; ++i) outs.push_back(all.data() + i * kLineBytes);
  const std::vector<size_t> counts(size, kLineBytes);
  owner_.island_->all_gather(own.data(), outs.data(), counts.data(), DType::U8, later());
  all.erase(std::remove(all.begin(), all.end(), '\0'), all.end());
  return all;
}

// All members come here together, because all know of the same disagreement.
void Agreement::Comparison::raise() {
  const std::string own = collected_calls();
  std::string words(kHostsLines, '\0');
  if (owner_.links_) {
    const size_t length = std::min(own.size(), kHostsLines - 1);
    std::memcpy(owner_.links_->prepare(kHostsLines), own.data(), length);
    owner_.links_->post(length);
    owner_.links_->wait(time_left());
    std::vector<Caller> callers;
    for (int host = 0; host < owner_.links_->size(); ++host) {
      add_callers(callers, reinterpret_cast<const char*>(owner_.links_->frame(host)));
    }
    const std::string all = sentence(callers);
    words.replace(0, std::min(all.size(), kHostsLines - 1), all, 0, kHostsLines - 1);
    words.resize(kHostsLines);
  }
  if (owner_.island_) owner_.island_->broadcast(words.data(), kHostsLines, DType::U8, 0, later());
  throw Mismatch(std::string("the ranks of the group made different calls: ") + words.c_str() +
                 ". All must call the same operations with the same sizes in the same order");
}

}  // namespace opensmd
