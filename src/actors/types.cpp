#include "actors/messages.hpp" // for the types of troupe_local
#include "actors/system.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

namespace troupe::detail {

known_types::known_types() { init_types<caf::id_block::troupe, caf::id_block::troupe_local>(); }

void register_types(config& cfg) {
  cfg.add_types<caf::id_block::troupe>();
  cfg.add_errors<errc>("troupe");
}

} // namespace troupe::detail
