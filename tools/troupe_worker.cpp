// The process of one device (troupe/worker.hpp), started by the library. Started by hand: an agent
// whose host's devices join a program on another host.

#include <troupe/worker.hpp>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

int join(troupe::host_agent_options what) {
  const auto why = troupe::run_host_agent(std::move(what));
  std::fprintf(stderr, "troupe-worker: %s\n", troupe::describe(why).c_str());
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  CLI::App app{"Lends the devices of this host to a program on another one, which listens with "
               "--troupe.hosts.listen, until it is told to end. In other uses, programs whose "
               "devices live in worker processes start it themselves."};
  troupe::host_agent_options what;
  std::int64_t pause_ms = 500;
  app.add_option("--connect", what.parent, "The program, as host:port")->required();
  app.add_option("--certificate", what.identity.certificate,
                 "File of this host's certificate, and of those between it and the authority's")
      ->required();
  app.add_option("--key", what.identity.key, "File of its key")->required();
  app.add_option("--authority", what.identity.authority,
                 "File of the authority whose certificates are those of the fleet")
      ->required();
  app.add_option("--revoked", what.identity.revoked,
                 "File of the certificates that the authority has revoked");
  app.add_option("--name", what.name,
                 "How this host is called, a name in its certificate; else the first one there");
  app.add_option("--parent-name", what.parent_name,
                 "The name or address that the program's certificate must be for; else that in "
                 "--connect");
  app.add_option("--listen", what.listen_address,
                 "This host's address for ranks of others; else that of its end of the connection");
  app.add_option("--program", what.workers.program,
                 "The workers' program, if it has launches or programs of its own; else this one");
  app.add_option("--devices", what.devices, "Virtual devices of the host backend")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--retry-ms", pause_ms, "Pause between attempts to join, in milliseconds")
      ->check(CLI::Range(1, 3'600'000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  what.retry_pause = std::chrono::milliseconds{pause_ms};
  return join(std::move(what));
}
