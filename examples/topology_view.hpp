/// A `p2p_graph` to look at: as text, and as a picture in graphviz's language.
#pragma once

#include <troupe/p2p_graph.hpp>

#include <string>

/// Who reaches whom over what, in the form of `nvidia-smi topo -m`, with a legend of its words and
/// the reasons of links that failed.
std::string link_matrix(const troupe::p2p_graph& graph);

/// What `measure_links` found: bandwidth of one direction, of both, and latency.
std::string measured_matrices(const troupe::p2p_graph& graph);

/// A picture under `title`, which is not empty. The devices lie on a circle, island by island; two
/// links between the same devices are one line unless they differ. What all links have in common
/// stands below the circle, lines have labels where they are few, or differ from the others.
std::string to_dot(const troupe::p2p_graph& graph, const std::string& title);
