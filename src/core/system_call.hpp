/// What calls of the operating system say when they fail.
#pragma once

#include <troupe/error.hpp>

#include <string>

namespace troupe::detail {

/// `code` is an errno. If the table of open files is full, the text names the limit.
caf::error system_failure(const char* api, int code, std::string detail);

/// The limit that an errno is about, as text; empty for one that is about none.
std::string limit_text(int code);

/// `why`, a failure to get memory of the system, as errc::out_of_memory; as it is if no more files
/// can be opened, which more free memory would not mend.
caf::error as_out_of_memory(const caf::error& why);

/// The text of an errno.
std::string system_text(int code);

} // namespace troupe::detail
