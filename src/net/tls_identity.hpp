/// Certificates that are read anew when their files have changed.
#pragma once

#include "net/tls_stream.hpp"

#include <chrono>
#include <memory>
#include <string>

namespace troupe::detail {

/// @thread one at a time
class tls_identity {
public:
  /// @errors errc::invalid_argument: a file cannot be used, with the reason
  static caf::expected<std::unique_ptr<tls_identity>> create(host_identity who,
                                                             tls_context::side which);

  /// Returns the context of the present files. If they cannot be used, the log says so, and the
  /// context stays that of the last files that could. Looks at the files once a second at most.
  const std::shared_ptr<tls_context>& current() noexcept;

private:
  using clock = std::chrono::steady_clock;

  tls_identity(host_identity who, tls_context::side which, std::string content,
               std::shared_ptr<tls_context> context) noexcept
      : who_(std::move(who)), which_(which), content_(std::move(content)),
        context_(std::move(context)), look_from_(clock::now() + interval) {}

  static constexpr std::chrono::seconds interval{1};

  const host_identity who_;
  const tls_context::side which_;
  std::string content_; ///< of all files, when they were read last
  std::shared_ptr<tls_context> context_;
  clock::time_point look_from_;
};

} // namespace troupe::detail
