/// Encrypted connections between two hosts that know each other by certificates.
#pragma once

#include "foundation/file_descriptor.hpp"
#include <troupe/worker.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

struct ssl_st;
struct ssl_ctx_st;

namespace troupe::detail {

/// The bytes at the start of each record of TLS that tell its kind and size.
inline constexpr std::size_t tls_record_head = 5;
/// Returns the size of the first record of a connection, with its head; none if it is not of TLS.
std::optional<std::size_t> size_of_hello(std::span<const std::byte, tls_record_head> head) noexcept;

/// The identity of this process and the authority that it trusts: TLS 1.3, a certificate of the
/// authority on both sides, no session resumption.
/// @thread any
class tls_context {
public:
  enum class side : std::uint8_t { parent, agent };

  /// @errors errc::invalid_argument: a file cannot be used, with the reason
  static caf::expected<std::shared_ptr<tls_context>> create(const host_identity& who, side which);

  ssl_ctx_st* native() const noexcept { return native_.get(); }
  side which() const noexcept { return side_; }
  /// Returns the names in the own certificate.
  std::vector<std::string> names() const;

private:
  struct deleter {
    void operator()(ssl_ctx_st* x) const noexcept;
  };

  tls_context(ssl_ctx_st* native, side which) : native_(native), side_(which) {}

  const std::unique_ptr<ssl_ctx_st, deleter> native_;
  const side side_;
};

/// A connection. No function blocks.
/// @thread one at a time
class tls_stream {
public:
  /// The result of an attempt.
  enum class outcome : std::uint8_t {
    done,
    wants_read,  ///< try again when the socket has data
    wants_write, ///< try again when the socket has room
    failed       ///< it is over; `error` says why
  };

  /// @shape  socket: connected
  /// @param  peer the address, for messages
  /// @param  peer_name the name that the peer's certificate must have; empty: any
  /// @errors errc::unavailable
  static caf::expected<tls_stream> create(std::shared_ptr<tls_context> context,
                                          file_descriptor socket, std::string peer,
                                          std::string peer_name = {});

  // Both first authenticate the two sides. On an agent a write may succeed before the parent has
  // checked the agent's certificate: then a read fails.

  /// @param into not empty
  /// @param got the number of bytes read
  outcome read(std::span<std::byte> into, std::size_t& got) noexcept;
  /// @param from not empty; after `wants_read` or `wants_write`, pass the rest again
  /// @param sent the number of bytes written
  outcome write(std::span<const std::byte> from, std::size_t& sent) noexcept;
  /// Tells the peer of the end, if there is room to send that.
  void end() noexcept;

  /// Returns whether each side has shown the other a valid certificate.
  bool is_authenticated() const noexcept;
  /// Returns whether the peer has shown a certificate, right or wrong.
  bool has_certificate() const noexcept;
  /// Returns why a read or write failed.
  const caf::error& error() const noexcept { return error_; }
  const std::string& peer() const noexcept { return peer_; }
  /// Return the subject of the peer's certificate and the names in it, after the handshake.
  std::string peer_subject() const;
  std::vector<std::string> peer_names() const;
  int native() const noexcept { return socket_.get(); }

private:
  struct deleter {
    void operator()(ssl_st* x) const noexcept;
  };

  tls_stream(std::shared_ptr<tls_context> context, file_descriptor socket, std::string peer,
             std::string peer_name)
      : context_(std::move(context)), socket_(std::move(socket)), peer_(std::move(peer)),
        peer_name_(std::move(peer_name)) {}
  /// Returns the native object for a call, with no error of earlier calls left.
  ssl_st* without_errors() noexcept;
  outcome judge(int result, const char* doing) noexcept;

  std::shared_ptr<tls_context> context_;
  file_descriptor socket_;
  std::string peer_;
  std::string peer_name_;
  std::unique_ptr<ssl_st, deleter> native_; // destroyed before the socket
  caf::error error_;
};

} // namespace troupe::detail
