/// A `p2p_graph` as text, and as a picture in graphviz's language.
#pragma once

#include <troupe/p2p_graph.hpp>

#include <string>

/// Returns the link of each pair as text, in the form of `nvidia-smi topo -m`, with a legend and
/// the reasons of failed links.
std::string link_matrix(const troupe::p2p_graph& graph);

/// Returns the results of `measure_links`: bandwidth in one direction and both, and latency.
std::string measured_matrices(const troupe::p2p_graph& graph);

/// Returns a picture under `title`, which must not be empty.
/// The devices are on a circle, sorted by islands. Two similar links between the same devices are
/// one line. Properties that links share are below the circle. Lines have labels if there are few
/// of them, or if they differ from the others.
std::string to_dot(const troupe::p2p_graph& graph, const std::string& title);
