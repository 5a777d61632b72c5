#include <troupe/backend.hpp>

namespace troupe {

std::string_view to_string(collective_kind x) noexcept {
  switch (x) {
  case collective_kind::all_reduce:
    return "all_reduce";
  case collective_kind::reduce:
    return "reduce";
  case collective_kind::broadcast:
    return "broadcast";
  case collective_kind::all_gather:
    return "all_gather";
  case collective_kind::reduce_scatter:
    return "reduce_scatter";
  case collective_kind::all_to_all:
    return "all_to_all";
  case collective_kind::all_to_all_v:
    return "all_to_all_v";
  case collective_kind::gather:
    return "gather";
  case collective_kind::scatter:
    return "scatter";
  case collective_kind::send:
    return "send";
  case collective_kind::recv:
    return "recv";
  case collective_kind::barrier:
    return "barrier";
  }
  return "unknown";
}

} // namespace troupe
