#include <troupe/way_table.hpp>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace troupe {

namespace {

struct way_line {
  std::uint64_t ranks = 0;
  collective_kind kind = collective_kind::barrier;
  std::uint64_t direct_up_to = 0;
};

std::optional<std::uint64_t> number_of(std::string_view text) noexcept {
  std::uint64_t result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  if (error != std::errc{} || end != text.data() + text.size())
    return std::nullopt;
  return result;
}

/// Returns none if the line is wrong.
std::optional<way_line> parse(std::istringstream& line) {
  std::string ranks;
  std::string kind;
  std::string bytes;
  std::string more;
  if (!(line >> ranks >> kind >> bytes) || line >> more)
    return std::nullopt;
  const auto of = number_of(ranks);
  const auto up_to = bytes == "all" ? std::optional{way_table::no_limit} : number_of(bytes);
  const auto what =
      std::ranges::find_if(all_collective_kinds, [&](auto x) { return to_string(x) == kind; });
  if (!of || !up_to || what == std::end(all_collective_kinds) || *what == collective_kind::recv ||
      *what == collective_kind::all_to_all_v)
    return std::nullopt;
  return way_line{*of, *what, *up_to};
}

caf::error wrong(const std::string& path, const std::string& what) {
  return make_error(errc::invalid_argument, path + ": " + what);
}

} // namespace

way_table way_table::built_in(std::size_t ranks) noexcept {
  constexpr std::uint64_t large = std::uint64_t{16} << 20;
  way_table result;
  if (ranks > 2)
    for (auto x : {collective_kind::all_reduce, collective_kind::reduce, collective_kind::broadcast,
                   collective_kind::all_gather, collective_kind::all_to_all})
      result.direct_up_to[static_cast<std::size_t>(x)] = large;
  return result;
}

caf::expected<way_table> read_way_table(const std::string& path, std::size_t ranks) {
  std::ifstream file{path};
  if (!file)
    return wrong(path, "the way table cannot be opened");
  way_table result;
  const auto limit = [&](collective_kind x) -> std::uint64_t& {
    return result.direct_up_to[static_cast<std::size_t>(x)];
  };
  bool any = false;
  std::string text;
  for (std::size_t number = 1; std::getline(file, text); ++number) {
    std::istringstream line{text.substr(0, text.find('#'))};
    if ((line >> std::ws).eof())
      continue;
    const auto x = parse(line);
    if (!x)
      return wrong(path, "line " + std::to_string(number) +
                             " is not a number of ranks, a kind of collective, and bytes or `all`");
    if (x->ranks != ranks)
      continue;
    any = true;
    limit(x->kind) = x->direct_up_to;
    if (x->kind == collective_kind::send)
      limit(collective_kind::recv) = x->direct_up_to;
  }
  if (file.bad())
    return wrong(path, "the way table cannot be read");
  if (!any)
    return wrong(path, "no line is for " + std::to_string(ranks) + " ranks");
  return result;
}

} // namespace troupe
