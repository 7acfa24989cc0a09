#include "torch/hosts/agreement.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/memory/parts.hpp"
#include "core/protocol/clock.hpp"
#include "core/protocol/context.hpp"

namespace opensmd {
namespace {

// Up to this size, data goes in the same round as the first member's word to its host: the extra copy costs less than
// another round.
constexpr size_t kMostTogether = 128u << 10;

size_t most_of_frame(int hosts) {
  const size_t each = kMostToAll / static_cast<size_t>(std::max(hosts - 1, 1));
  return std::min(kMostOneWay, each / kLine * kLine);
}

uint64_t digest_with(uint64_t digest, const Signature& signature) {
  uint64_t mixed = (digest ^ signature.hash()) * 0x9e3779b97f4a7c15u;
  return mixed ^ (mixed >> 29);
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

Agreement::Agreement(std::shared_ptr<Local> local, Wire& wire, const Layout& layout, size_t carried)
    : local_(std::move(local)),
      name_(wire.name(wire.rank())),
      hosts_(layout.hosts()),
      host_(layout.host()),
      carried_(carried),
      most_(std::max(carried, most_of_frame(hosts_))) {
  if (local_->rank() != 0) return;
  std::vector<int> firsts;
  for (int host = 0; host < hosts_; ++host) firsts.push_back(layout.members(host)[0]);
  links_.emplace(wire, std::move(firsts), Comparison::kHeaderBytes + most_);
}

void Agreement::check(const Signature& signature, const Call& call) {
  Comparison comparison(*this, signature, call);
  comparison.meet();
  comparison.post();
  comparison.conclude();
}

Agreement::Comparison::Comparison(Agreement& owner, const Signature& signature, const Call& call, Route route,
                                  uint64_t detail)
    : owner_(owner), signature_(signature), call_(call), route_(route), detail_(detail), start_ns_(now_ns()) {
  ++owner_.sequence_;
  owner_.digest_ = digest_with(owner_.digest_, signature);
}

void Agreement::Comparison::meet() {
  if (owner_.local_->alone()) return;
  using Words = std::array<uint64_t, 2>;
  const Words own{owner_.digest_, detail_};
  std::vector<Words> all(static_cast<size_t>(owner_.local_->size()));
  std::vector<void*> outs;
  for (auto& words : all) outs.push_back(words.data());
  const std::vector<size_t> counts(all.size(), own.size());
  owner_.local_->all_gather(own.data(), outs.data(), counts.data(), DType::U64, call_);
  bool agreed = true;
  for (const auto& words : all) {
    agreed = agreed && words[0] == own[0];
    same_detail_ = same_detail_ && words[1] == own[1];
  }
  if (!agreed) {
    throw DifferentCalls(c10::str(owner_.name_, " called ", describe(signature_, call_.text),
                                  ", and another rank of its host something else"));
  }
}

std::byte* Agreement::Comparison::payload_for(int host) { return owner_.links_->outgoing(host) + kHeaderBytes; }

Agreement::Comparison::Header Agreement::Comparison::own_header() const {
  Header header{};
  header.sequence = owner_.sequence_;
  header.digest = owner_.digest_;
  header.same_detail = same_detail_;
  header.detail = detail_;
  header.signature = signature_;
  return header;
}

void Agreement::Comparison::post(const std::vector<size_t>& bytes) {
  if (!first()) return;
  const Header header = own_header();
  static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) <= kHeaderBytes);
  for (int step = 1; step < owner_.hosts_; ++step) {
    const int host = (owner_.host_ + step) % owner_.hosts_;
    if (!route_.leads(owner_.host_, host)) continue;
    std::memcpy(owner_.links_->outgoing(host), &header, sizeof(header));
    owner_.links_->post(host, kHeaderBytes + (bytes.empty() ? 0 : bytes[static_cast<size_t>(host)]));
  }
}

void Agreement::Comparison::post_to_all(size_t bytes) {
  if (!first()) return;
  for (int host = 0; host < owner_.hosts_; ++host) {
    if (bytes > 0 && route_.leads(owner_.host_, host)) std::memcpy(payload_for(host), payload_for(owner_.host_), bytes);
  }
  post(std::vector<size_t>(static_cast<size_t>(owner_.hosts_), bytes));
}

const Agreement::Comparison::Header& Agreement::Comparison::header(int host) {
  return *reinterpret_cast<const Header*>(owner_.links_->frame(host));
}

const std::byte* Agreement::Comparison::payload(int host) { return owner_.links_->frame(host) + kHeaderBytes; }

milliseconds Agreement::Comparison::time_left() const {
  const milliseconds used(static_cast<int64_t>((now_ns() - start_ns_) / 1000000u));
  return std::max(call_.timeout - used, milliseconds{1});
}

Call Agreement::Comparison::later() const { return {call_.text, time_left()}; }

void Agreement::Comparison::conclude() {
  hear();
  if (route_.leads_to(owner_.host_)) tell_here(nullptr, 0);
}

void Agreement::Comparison::pass_on(size_t bytes) {
  const int source = first() ? route_.source(owner_.host_) : -1;
  if (source < 0) return;
  for (int host = 0; bytes > 0 && host < owner_.hosts_; ++host) {
    if (route_.leads(owner_.host_, host)) std::memcpy(payload_for(host), payload(source), bytes);
  }
  post(std::vector<size_t>(static_cast<size_t>(owner_.hosts_), bytes));
}

void Agreement::Comparison::finish() {
  if (first()) owner_.links_->wait({}, time_left());
}

void Agreement::Comparison::hear() {
  if (!first()) return;
  std::vector<int> heard;
  for (int host = 0; host < owner_.hosts_; ++host) {
    if (route_.leads(host, owner_.host_)) heard.push_back(host);
  }
  owner_.links_->wait(heard, time_left());
  for (int host : heard) {
    const Header& theirs = header(host);
    if (theirs.sequence != owner_.sequence_ || theirs.digest != owner_.digest_) raise(host);
    same_detail_ = same_detail_ && theirs.same_detail && theirs.detail == detail_;
  }
}

std::byte* Agreement::Comparison::together(size_t bytes) {
  if (bytes == 0 || bytes > kMostTogether || owner_.local_->alone()) return nullptr;
  together_ = std::make_unique_for_overwrite<std::byte[]>(sizeof(uint64_t) + bytes);
  return together_.get();
}

void Agreement::Comparison::tell_here(std::byte* together, size_t bytes) {
  uint64_t same = same_detail_;
  if (together) {
    std::memcpy(together, &same, sizeof(same));
    owner_.local_->broadcast(together, sizeof(same) + bytes, DType::U8, 0, later());
    std::memcpy(&same, together, sizeof(same));
  } else {
    owner_.local_->broadcast(&same, 1, DType::U64, 0, later());
  }
  same_detail_ = same != 0;
}

// Reports what is known here; failure.hpp asks all members.
void Agreement::Comparison::raise(int host) {
  throw DifferentCalls(c10::str(owner_.name_, " called ", describe(signature_, call_.text), "; ",
                                owner_.links_->name(host), " called ", describe(header(host).signature, "")));
}

}  // namespace opensmd
