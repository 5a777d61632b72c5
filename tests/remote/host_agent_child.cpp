// The agents of a test_fleet.

#include "remote/hosts_support.hpp"

namespace troupe::testing {

TROUPE_CHILD(host_agent_child) { return run_agent_of_environment(); }

} // namespace troupe::testing
