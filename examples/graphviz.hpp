/// Pictures by graphviz.
#pragma once

#include <caf/error.hpp>

#include <string>

/// Has graphviz's program `dot` write the picture that `text` describes to `file`, as SVG.
/// @errors errc::unavailable: it is not installed; errc::invalid_argument: it says no, for reasons
///         that it writes to the standard error output; errc::internal: what the system says
caf::error render_svg(const std::string& text, const std::string& file);
