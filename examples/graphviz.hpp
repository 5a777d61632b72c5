/// Pictures by graphviz.
#pragma once

#include <caf/error.hpp>

#include <string>

/// Renders the picture that `text` describes to `file`, as SVG, with graphviz's program `dot`.
/// @errors errc::unavailable: `dot` is not installed; errc::invalid_argument: it failed, and wrote
///         the reason to its standard error output; errc::internal: a system call failed
caf::error render_svg(const std::string& text, const std::string& file);
