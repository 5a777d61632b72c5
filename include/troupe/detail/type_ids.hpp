/// The types that travel in messages; their order is part of the wire format of CAF 1.x.
#pragma once

#include <caf/type_id.hpp>

namespace troupe {

enum class errc : unsigned char;
enum class part_state : unsigned char;
struct failure;
enum class dtype : unsigned char;
enum class reduce_op : unsigned char;

} // namespace troupe

CAF_BEGIN_TYPE_ID_BLOCK(troupe, caf::first_custom_type_id)
CAF_ADD_TYPE_ID(troupe, (troupe::errc))
CAF_ADD_TYPE_ID(troupe, (troupe::part_state))
CAF_ADD_TYPE_ID(troupe, (troupe::failure))
CAF_ADD_TYPE_ID(troupe, (troupe::dtype))
CAF_ADD_TYPE_ID(troupe, (troupe::reduce_op))
CAF_END_TYPE_ID_BLOCK(troupe)
