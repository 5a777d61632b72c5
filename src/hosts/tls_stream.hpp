/// Bytes between two hosts that know each other by certificates.
#pragma once

#include "core/file_descriptor.hpp"
#include <troupe/worker.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct ssl_st;
struct ssl_ctx_st;

namespace troupe::detail {

/// Who this process is, and whom it believes: TLS 1.3, a certificate of the authority on both
/// sides, no session that is resumed.
/// @thread any
class tls_context {
public:
  enum class side : std::uint8_t { parent, agent };

  /// @errors errc::invalid_argument: a file that cannot be used, with the reason
  static caf::expected<std::shared_ptr<tls_context>> create(const host_identity& who, side which);

  ssl_ctx_st* native() const noexcept { return native_.get(); }
  side which() const noexcept { return side_; }

private:
  struct deleter {
    void operator()(ssl_ctx_st* x) const noexcept;
  };

  tls_context(ssl_ctx_st* native, side which) : native_(native), side_(which) {}

  const std::unique_ptr<ssl_ctx_st, deleter> native_;
  const side side_;
};

/// One connection. Nothing of it blocks.
/// @thread one at a time
class tls_stream {
public:
  /// How an attempt went.
  enum class outcome : std::uint8_t {
    done,
    wants_read,  ///< again, when the socket has something
    wants_write, ///< again, when it has room
    over,        ///< the peer has ended the connection, in good order
    failed       ///< `error` says why; nothing works any more
  };

  /// @shape  socket: connected
  /// @param  peer for sentences: the address
  /// @param  peer_name that the peer's certificate must be for; empty: any
  /// @errors errc::unavailable
  static caf::expected<tls_stream> create(std::shared_ptr<tls_context> context,
                                          file_descriptor socket, std::string peer,
                                          const std::string& peer_name = {});

  /// Makes each side know the other. Before anything else. For the agent it can be done before the
  /// parent has judged its certificate: its first read fails then.
  outcome shake_hands() noexcept;
  /// @param into not empty
  /// @param got how much is done
  outcome read(std::span<std::byte> into, std::size_t& got) noexcept;
  /// @param from not empty; the rest of it comes again where it wants something
  /// @param sent how much is done
  outcome write(std::span<const std::byte> from, std::size_t& sent) noexcept;
  /// Tells the peer, as far as there is room.
  void end() noexcept;

  /// Why something failed, or is over.
  const caf::error& error() const noexcept { return error_; }
  const std::string& peer() const noexcept { return peer_; }
  /// The subject of the peer's certificate, after the handshake.
  std::string peer_subject() const;
  int native() const noexcept { return socket_.get(); }

private:
  struct deleter {
    void operator()(ssl_st* x) const noexcept;
  };

  tls_stream(std::shared_ptr<tls_context> context, file_descriptor socket, std::string peer)
      : context_(std::move(context)), socket_(std::move(socket)), peer_(std::move(peer)) {}
  outcome judge(int result, const char* doing) noexcept;

  std::shared_ptr<tls_context> context_;
  file_descriptor socket_;
  std::string peer_;
  std::unique_ptr<ssl_st, deleter> native_; // before the socket goes
  caf::error error_;
};

} // namespace troupe::detail
