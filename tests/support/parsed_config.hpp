/// A configuration parsed from a command line.
#pragma once

#include "support/expect.hpp"
#include <troupe/config.hpp>

#include <string>
#include <vector>

namespace troupe::testing {

/// Selects the host backend and applies `arguments`.
class parsed_config : public config {
public:
  explicit parsed_config(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"program", "--troupe.backend=host"});
    std::vector<char*> pointers;
    for (auto& x : arguments)
      pointers.push_back(x.data());
    must(parse(static_cast<int>(pointers.size()), pointers.data()));
  }
};

} // namespace troupe::testing
