#include "net/tls_identity.hpp"

#include "foundation/log.hpp"

#include <utility>

namespace troupe::detail {

namespace {

/// Returns what the files contain, or why one of them cannot be read.
std::string content_of(const host_identity& who) {
  std::string result;
  for (const auto* file : {&who.certificate, &who.key, &who.authority, &who.revoked}) {
    if (file->empty())
      continue;
    auto content = read_file(*file);
    result += (content ? *content : describe(content.error())) + '\0';
  }
  return result;
}

} // namespace

caf::expected<std::unique_ptr<tls_identity>> tls_identity::create(host_identity who,
                                                                  tls_context::side which) {
  auto content = content_of(who); // first: if a file changes now, the next look sees that
  auto context = tls_context::create(who, which);
  if (!context)
    return context.error();
  return std::unique_ptr<tls_identity>{
      new tls_identity{std::move(who), which, std::move(content), std::move(*context)}};
}

const std::shared_ptr<tls_context>& tls_identity::current() noexcept {
  if (const auto now = clock::now(); now < look_from_)
    return context_;
  else
    look_from_ = now + interval;
  auto content = content_of(who_);
  if (content == content_)
    return context_;
  content_ = std::move(content);
  if (auto context = tls_context::create(who_, which_)) {
    context_ = std::move(*context);
    log(log_level::info, "the certificate " + who_.certificate + " and its files were read anew");
  } else {
    log(log_level::error, "changed certificates cannot be used; those from before stay in use",
        context.error());
  }
  return context_;
}

} // namespace troupe::detail
