#include "net/tls_stream.hpp"

#include "foundation/peer_text.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

namespace troupe::detail {

namespace {

/// @units bytes of a peer's certificates that this process keeps at most
constexpr long most_certificate_bytes = 32 << 10;
constexpr int most_certificates = 8; ///< between a peer's certificate and the authority's

/// Returns OpenSSL's errors of this thread, and clears them.
std::string take_errors() {
  std::string result;
  while (const auto code = ERR_get_error()) {
    const char* reason = ERR_reason_error_string(code);
    std::array<char, 256> number{};
    ERR_error_string_n(code, number.data(), number.size());
    if (!result.empty())
      result += "; ";
    result += reason != nullptr ? reason : number.data();
  }
  return result.empty() ? "no reason given" : result;
}

caf::error unusable(const char* what, const std::string& file) {
  return make_error(errc::invalid_argument,
                    std::string{what} + " '" + file + "' cannot be used: " + take_errors());
}

std::string text_of(const ASN1_STRING* x) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(x)),
          static_cast<std::size_t>(ASN1_STRING_length(x))};
}

/// Returns the DNS names of a certificate; without any, the common name of its subject.
std::vector<std::string> names_in(X509* certificate) {
  std::vector<std::string> result;
  const auto free_all = [](GENERAL_NAMES* x) { GENERAL_NAMES_free(x); };
  const std::unique_ptr<GENERAL_NAMES, decltype(free_all)> all{
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)),
      free_all};
  for (int i = 0; i < sk_GENERAL_NAME_num(all.get()); ++i) // -1 if there are none
    if (const auto* x = sk_GENERAL_NAME_value(all.get(), i); x->type == GEN_DNS)
      result.push_back(text_of(x->d.dNSName));
  if (!result.empty())
    return result;
  const auto* subject = X509_get_subject_name(certificate);
  if (const int i = X509_NAME_get_index_by_NID(subject, NID_commonName, -1); i >= 0)
    result.push_back(text_of(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, i))));
  return result;
}

/// Refuses a key with a passphrase, since there is no user to ask.
int no_passphrase(char*, int, int, void*) { return -1; }

// A BIO for a socket, without SIGPIPE if the peer is gone.

int native_of(BIO* x) noexcept {
  return static_cast<int>(reinterpret_cast<std::intptr_t>(BIO_get_data(x)));
}

/// Calls `call`, which reads or writes without blocking. `waits_for`: the flag of its direction.
template <class F> int transfer(BIO* x, int waits_for, F call) noexcept {
  BIO_clear_retry_flags(x);
  ssize_t n = 0;
  do
    n = call(native_of(x));
  while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
    BIO_set_flags(x, waits_for | BIO_FLAGS_SHOULD_RETRY);
  return static_cast<int>(n);
}

int socket_read(BIO* x, char* into, int size) {
  return transfer(x, BIO_FLAGS_READ,
                  [&](int fd) { return ::recv(fd, into, static_cast<std::size_t>(size), 0); });
}

int socket_write(BIO* x, const char* from, int size) {
  return transfer(x, BIO_FLAGS_WRITE, [&](int fd) {
    return ::send(fd, from, static_cast<std::size_t>(size), MSG_NOSIGNAL);
  });
}

long socket_control(BIO*, int what, long, void*) { return what == BIO_CTRL_FLUSH ? 1 : 0; }

const BIO_METHOD* socket_method() noexcept {
  static const BIO_METHOD* const result = [] {
    auto* x = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "a socket");
    if (x != nullptr) {
      BIO_meth_set_read(x, socket_read);
      BIO_meth_set_write(x, socket_write);
      BIO_meth_set_ctrl(x, socket_control);
    }
    return x;
  }();
  return result;
}

bool is_number(const std::string& name) noexcept {
  in6_addr into{};
  return ::inet_pton(AF_INET, name.c_str(), &into) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), &into) == 1;
}

} // namespace

std::optional<std::size_t>
size_of_hello(std::span<const std::byte, tls_record_head> head) noexcept {
  constexpr std::byte handshake{22};
  constexpr std::byte major_version{3};
  constexpr std::size_t largest = 16 << 10; // of a record that is not encrypted
  const auto size =
      std::to_integer<std::size_t>(head[3]) << 8 | std::to_integer<std::size_t>(head[4]);
  if (head[0] != handshake || head[1] != major_version || size == 0 || size > largest)
    return std::nullopt;
  return tls_record_head + size;
}

// -- context

void tls_context::deleter::operator()(ssl_ctx_st* x) const noexcept { SSL_CTX_free(x); }

caf::expected<std::shared_ptr<tls_context>> tls_context::create(const host_identity& who,
                                                                side which) {
  if (who.certificate.empty() || who.key.empty() || who.authority.empty())
    return make_error(errc::invalid_argument,
                      which == side::parent
                          ? "set troupe.hosts.certificate, .key and .authority"
                          : "set host_agent_options::identity: certificate, key and authority");
  // OpenSSL's cleanup at the end of the process would interfere with the hosts' threads.
  if (OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr) != 1)
    return make_error(errc::unavailable, "OpenSSL cannot be used: " + take_errors());
  ERR_clear_error();
  auto* native = SSL_CTX_new(which == side::parent ? TLS_server_method() : TLS_client_method());
  if (native == nullptr)
    return make_error(errc::unavailable, "OpenSSL cannot create a context: " + take_errors());
  std::shared_ptr<tls_context> result{new tls_context{native, which}};
  if (SSL_CTX_set_min_proto_version(native, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(native, TLS1_3_VERSION) != 1)
    return make_error(errc::unavailable, "OpenSSL has no TLS 1.3: " + take_errors());
  SSL_CTX_set_default_passwd_cb(native, no_passphrase);
  if (SSL_CTX_use_certificate_chain_file(native, who.certificate.c_str()) != 1)
    return unusable("the certificate", who.certificate);
  if (SSL_CTX_use_PrivateKey_file(native, who.key.c_str(), SSL_FILETYPE_PEM) != 1)
    return unusable("the key", who.key);
  if (SSL_CTX_check_private_key(native) != 1)
    return unusable("the key", who.key);
  // Only this authority counts, none of the system's.
  if (SSL_CTX_load_verify_file(native, who.authority.c_str()) != 1)
    return unusable("the authority", who.authority);
  if (!who.revoked.empty()) {
    auto* lookup = X509_STORE_add_lookup(SSL_CTX_get_cert_store(native), X509_LOOKUP_file());
    if (lookup == nullptr ||
        X509_load_crl_file(lookup, who.revoked.c_str(), X509_FILETYPE_PEM) <= 0 ||
        X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(native),
                                    X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL) != 1)
      return unusable("the list of revoked certificates", who.revoked);
  }
  SSL_CTX_set_verify(native, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_verify_depth(native, most_certificates);
  SSL_CTX_set_max_cert_list(native, most_certificate_bytes);
  SSL_CTX_set_session_cache_mode(native, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(native, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(native, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                               SSL_MODE_RELEASE_BUFFERS);
  if (SSL_CTX_set_num_tickets(native, 0) != 1)
    return make_error(errc::unavailable, "OpenSSL: " + take_errors());
  return result;
}

std::vector<std::string> tls_context::names() const {
  auto* certificate = SSL_CTX_get0_certificate(native_.get());
  return certificate != nullptr ? names_in(certificate) : std::vector<std::string>{};
}

// -- a connection

void tls_stream::deleter::operator()(ssl_st* x) const noexcept { SSL_free(x); }

caf::expected<tls_stream> tls_stream::create(std::shared_ptr<tls_context> context,
                                             file_descriptor socket, std::string peer,
                                             std::string peer_name) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0)
    return system_failure("fcntl", errno, "the connection with " + peer);
  tls_stream result{std::move(context), std::move(socket), std::move(peer), std::move(peer_name)};
  ERR_clear_error();
  auto failed = [] { return make_error(errc::unavailable, "OpenSSL: " + take_errors()); };
  result.native_.reset(SSL_new(result.context_->native()));
  auto* ssl = result.native_.get();
  if (ssl == nullptr)
    return failed();
  auto* bio = socket_method() != nullptr ? BIO_new(socket_method()) : nullptr;
  if (bio == nullptr)
    return failed();
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<std::intptr_t>(result.socket_.get())));
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl, bio, bio);
  if (const auto& name = result.peer_name_; !name.empty()) {
    const bool set = is_number(name)
                         ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name.c_str()) == 1
                         : SSL_set1_host(ssl, name.c_str()) == 1;
    if (!set)
      return make_error(errc::invalid_argument, "invalid host name: '" + name + "'");
  }
  if (result.context_->which() == tls_context::side::parent)
    SSL_set_accept_state(ssl);
  else
    SSL_set_connect_state(ssl);
  return result;
}

ssl_st* tls_stream::without_errors() noexcept {
  ERR_clear_error();
  errno = 0;
  return native_.get();
}

bool tls_stream::is_authenticated() const noexcept {
  return SSL_is_init_finished(native_.get()) == 1;
}

bool tls_stream::has_certificate() const noexcept {
  return is_authenticated() || SSL_get_verify_result(native_.get()) != X509_V_OK;
}

tls_stream::outcome tls_stream::judge(int result, const char* doing) noexcept {
  if (result == 1)
    return outcome::done;
  const int native_error = errno;
  const bool authenticated = is_authenticated();
  switch (SSL_get_error(native_.get(), result)) {
  case SSL_ERROR_WANT_READ:
    return outcome::wants_read;
  case SSL_ERROR_WANT_WRITE:
    return outcome::wants_write;
  case SSL_ERROR_ZERO_RETURN:
    error_ = make_error(errc::unavailable,
                        peer_ + " has ended the " + (authenticated ? "connection" : "handshake"));
    return outcome::failed;
  case SSL_ERROR_SYSCALL:
    ERR_clear_error();
    error_ = native_error == 0
                 ? make_error(errc::unavailable, peer_ + " has closed the connection")
                 : system_failure(authenticated ? doing : "SSL_do_handshake", native_error,
                                  "the connection with " + peer_ + " is lost");
    return outcome::failed;
  default:
    break;
  }
  auto why = take_errors();
  const auto verdict = SSL_get_verify_result(native_.get());
  if (verdict != X509_V_OK)
    why += std::string{"; the peer's certificate: "} + X509_verify_cert_error_string(verdict);
  if (verdict == X509_V_ERR_HOSTNAME_MISMATCH || verdict == X509_V_ERR_IP_ADDRESS_MISMATCH)
    why += ": it is not for " + peer_name_;
  error_ = make_error(errc::unavailable, "the connection with " + peer_ + " failed: " + why);
  return outcome::failed;
}

tls_stream::outcome tls_stream::read(std::span<std::byte> into, std::size_t& got) noexcept {
  got = 0;
  return judge(SSL_read_ex(without_errors(), into.data(), into.size(), &got), "SSL_read");
}

tls_stream::outcome tls_stream::write(std::span<const std::byte> from, std::size_t& sent) noexcept {
  sent = 0;
  return judge(SSL_write_ex(without_errors(), from.data(), from.size(), &sent), "SSL_write");
}

void tls_stream::end() noexcept {
  if (error_ || !native_ || !is_authenticated())
    return;
  ERR_clear_error();
  static_cast<void>(
      SSL_shutdown(native_.get())); // without room the peer sees only the end of the socket
  ERR_clear_error();
}

std::vector<std::string> tls_stream::peer_names() const {
  auto* certificate = SSL_get0_peer_certificate(native_.get());
  return certificate != nullptr ? names_in(certificate) : std::vector<std::string>{};
}

std::string tls_stream::peer_subject() const {
  auto* certificate = SSL_get0_peer_certificate(native_.get());
  if (certificate == nullptr)
    return {};
  std::unique_ptr<BIO, decltype(&BIO_free)> text{BIO_new(BIO_s_mem()), BIO_free};
  if (!text ||
      X509_NAME_print_ex(text.get(), X509_get_subject_name(certificate), 0, XN_FLAG_ONELINE) < 0)
    return {};
  char* first = nullptr;
  const auto size = BIO_get_mem_data(text.get(), &first);
  return peer_text({first, static_cast<std::size_t>(size)}, most_peer_name);
}

} // namespace troupe::detail
