/// Messages of the program's own, next to those of the library.
///
///     CAF_BEGIN_TYPE_ID_BLOCK(my_block, ::troupe::first_message_type_id)
///     CAF_ADD_TYPE_ID(my_block, (my_message))
///     CAF_END_TYPE_ID_BLOCK(my_block)
///     ...
///     troupe::register_messages<caf::id_block::my_block>(); // first in `main`
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/detail/type_ids.hpp>

#include <caf/type_id.hpp>

namespace troupe {

/// The first type id that a program can use: those from `caf::first_custom_type_id` on are the
/// library's.
inline constexpr auto first_message_type_id = caf::id_block::troupe_local::end;

/// Registers blocks of message types with CAF 1.x, before the first configuration is made. CAF 0.17
/// needs this only for messages to other processes, and gets it from the configuration:
/// `add_message_types`.
template <class... Blocks> void register_messages() { detail::init_types<Blocks...>(); }

} // namespace troupe
