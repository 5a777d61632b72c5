/// What calls of the operating system say when they fail.
#pragma once

#include <troupe/error.hpp>

#include <string>

namespace troupe::detail {

/// `code` is an errno.
caf::error system_failure(const char* api, int code, std::string detail);

/// The text of an errno.
std::string system_text(int code);

} // namespace troupe::detail
