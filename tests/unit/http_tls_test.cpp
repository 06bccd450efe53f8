// SPDX-License-Identifier: Apache-2.0
//
// The client over TLS, against a server behind a TLS proxy. The proxy is Python's `ssl`, the
// certificates are made by `openssl`; where one of them is missing the test is a skip by name.

#include <doctest/doctest.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <weightwire/http/http_sync_client.hpp>
#include <weightwire/http/server.hpp>

#include "../support/temporary_folder.hpp"

namespace {

using namespace std::chrono_literals;
using namespace weightwire;
using test_support::temporary_folder;

/// Takes TLS connections and hands their bytes on to a port of this machine.
constexpr std::string_view proxy_program = R"(
import os, select, signal, socket, ssl, sys, threading
signal.alarm(120)  # whatever becomes of the test
certificate, key, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], os.getpid(), flush=True)

def serve(client):
    try:
        with context.wrap_socket(client, server_side=True) as outer, \
                socket.create_connection(("127.0.0.1", port)) as inner:
            while True:
                ready = [outer] if outer.pending() else select.select([outer, inner], [], [])[0]
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    (inner if one is outer else outer).sendall(data)
    except OSError:
        pass  # a client that refuses the certificate, or leaves

while True:
    threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()
)";

/// Runs `command` in a shell, without its output.
bool runs(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

/// An authority, a certificate of it for 127.0.0.1, and another authority.
bool make_certificates(const temporary_folder& folder) {
    folder.write("san", "subjectAltName=IP:127.0.0.1\n");
    const std::string in_folder = "cd '" + folder.path() + "' && openssl ";
    const std::string new_key = " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
    const auto authority = [&](const std::string& name) {
        return runs(in_folder + "req -x509" + new_key + "-days 1 -subj '/CN=" + name +
                    "' -keyout " + name + ".key -out " + name + ".pem");
    };
    return authority("ours") && authority("other") &&
           runs(in_folder + "req" + new_key + "-subj /CN=worker -keyout worker.key -out w.csr") &&
           runs(in_folder +
                "x509 -req -in w.csr -CA ours.pem -CAkey ours.key -CAcreateserial -days 1 "
                "-extfile san -out worker.pem");
}

/// The proxy as a process. Killed with this object.
class tls_proxy {
public:
    tls_proxy(const temporary_folder& folder, std::uint16_t port)
        : out_{::popen(
              ("exec python3 '" + folder.write("proxy.py", proxy_program) + "' '" +
               folder / "worker.pem" + "' '" + folder / "worker.key" + "' " + std::to_string(port))
                  .c_str(),
              "r")} {
        REQUIRE(out_ != nullptr);
        REQUIRE(std::fscanf(out_, "%d %d", &port_, &process_) == 2);
    }
    tls_proxy(const tls_proxy&) = delete;
    tls_proxy& operator=(const tls_proxy&) = delete;
    ~tls_proxy() {
        ::kill(process_, SIGKILL);
        ::pclose(out_);
    }
    [[nodiscard]] std::string url(std::string_view host = "127.0.0.1") const {
        return "https://" + std::string{host} + ":" + std::to_string(port_);
    }

private:
    std::FILE* out_;
    int port_ = 0;
    pid_t process_ = 0;
};

/// Says the length of what it was sent.
struct length_teller {
    http_response handle(const http_request& request) const {
        return {.content_type = "text/plain", .body = std::to_string(request.body.size())};
    }
};

peer_reply call(const std::string& url, const std::string& ca_file, std::string_view body = "{}") {
    http_sync_client client{url, {.ca_file = ca_file}};
    return client.request("POST", "/update_weights", {.bodies = {&body, 1}}, deadline::after(20s))
        .front();
}

void check_refused(const peer_reply& reply, std::string_view why) {
    CHECK(reply.answer.status == 0);
    CHECK(reply.answer.fault == reply_fault::unreachable);
    CHECK_MESSAGE(reply.answer.fault_text.find(why) != std::string::npos, reply.answer.fault_text);
}

}  // namespace

TEST_CASE("over TLS a server is trusted by the ca_file, and nothing is sent to another") {
    const temporary_folder folder;
    if (!runs("python3 -c 'import ssl'") || !make_certificates(folder)) {
        std::printf("SKIP the client over TLS: openssl or Python's ssl is missing\n");
        return;
    }
    http::server server{length_teller{}};
    server.start();
    const tls_proxy proxy{folder, server.port()};
    const auto ours = folder / "ours.pem";

    CHECK(call(proxy.url(), ours).answer.body == "2");
    const std::string large(3U << 20U, 'x');
    CHECK(call(proxy.url(), ours, large).answer.body == std::to_string(large.size()));

    check_refused(call(proxy.url(), ""), "certificate");
    check_refused(call(proxy.url(), folder / "other.pem"), "certificate");
    check_refused(call(proxy.url("localhost"), ours), "localhost");
    check_refused(call(proxy.url(), folder / "missing.pem"), "missing.pem");
    const auto plain = call("https://127.0.0.1:" + std::to_string(server.port()), ours);
    check_refused(plain, "SSL");
    check_refused(plain, "does the server speak https?");
}
