// Reads a flight record of troupe, reports which rank is behind, and converts it for trace viewers.

#include "flight_report.hpp"
#include "flight_trace.hpp"
#include "foundation/peer_text.hpp"
#include "foundation/write_file.hpp"
#include "record.hpp"

#include <CLI/CLI.hpp>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include <signal.h>

namespace {

void write(const std::string& path, const std::string& text) {
  if (const auto why = troupe::detail::replace_file(path, text))
    throw flight::bad_record("cannot write " + path + ": " + to_string(*why));
}

} // namespace

int main(int argc, char** argv) {
  std::string file;
  std::string trace_file;
  CLI::App app{"Reads a flight record of troupe: which rank is behind, and in what operation"};
  app.add_option("file", file, "the flight record")->required();
  app.add_option("--trace", trace_file,
                 "file for the same as Trace Event JSON, which ui.perfetto.dev opens");
  CLI11_PARSE(app, argc, argv);
  ::signal(SIGXFSZ, SIG_IGN); // a write beyond the limit of file sizes fails instead
  try {
    auto record = flight::read_record(file);
    std::fputs(flight::report(record).c_str(), stdout);
    if (!trace_file.empty())
      write(trace_file, flight::trace(record));
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "troupe-flight: there is not enough memory for %s\n",
                 troupe::detail::peer_text(file).c_str());
    return 1;
  } catch (const std::exception& e) {
    constexpr std::size_t most = 16 << 10; // it has the name of a file, and may quote the file
    std::fprintf(stderr, "troupe-flight: %s\n", troupe::detail::peer_text(e.what(), most).c_str());
    return 1;
  }
  return std::fflush(stdout) == 0 ? 0 : 1;
}
