#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace tests {

/// One end of two pipes. Values are trivially copyable; text ends with the pipe.
class channel {
public:
    channel(int in, int out) noexcept : in_{in}, out_{out} {}
    channel(channel&& other) noexcept
        : in_{std::exchange(other.in_, -1)}, out_{std::exchange(other.out_, -1)} {}
    channel& operator=(channel&& other) noexcept {
        std::swap(in_, other.in_);
        std::swap(out_, other.out_);
        return *this;
    }
    ~channel() {
        close_in();
        close_out();
    }

    template <class T>
        requires std::is_trivially_copyable_v<T>
    void put(const T& value) const {
        if (::write(out_, &value, sizeof value) != static_cast<ssize_t>(sizeof value)) {
            throw std::runtime_error{"the other process is gone"};
        }
    }
    template <class T>
        requires std::is_trivially_copyable_v<T>
    [[nodiscard]] T take() const {
        T value{};
        auto* at = reinterpret_cast<char*>(&value);
        for (std::size_t done = 0; done < sizeof value;) {
            done += some(at + done, sizeof value - done);
        }
        return value;
    }
    /// A text after which more may come.
    void put_string(const std::string& text) const {
        put(text.size());
        for (const char letter : text) {
            put(letter);
        }
    }
    [[nodiscard]] std::string take_string() const {
        std::string text(take<std::size_t>(), '\0');
        for (char& letter : text) {
            letter = take<char>();
        }
        return text;
    }
    void put_text(const std::string& text) {
        [[maybe_unused]] const auto count = ::write(out_, text.data(), text.size());
        close_out();
    }
    /// All that still comes.
    [[nodiscard]] std::string rest() const {
        std::string text;
        for (;;) {
            std::array<char, 4096> piece{};
            wait();
            const auto count = ::read(in_, piece.data(), piece.size());
            if (count <= 0) {
                return text;
            }
            text.append(piece.data(), static_cast<std::size_t>(count));
        }
    }
    void close_in() noexcept {
        if (in_ >= 0) {
            ::close(std::exchange(in_, -1));
        }
    }
    void close_out() noexcept {
        if (out_ >= 0) {
            ::close(std::exchange(out_, -1));
        }
    }

private:
    void wait() const {
        pollfd ready{.fd = in_, .events = POLLIN, .revents = 0};
        if (::poll(&ready, 1, 60'000) != 1) {
            throw std::runtime_error{"the other process says nothing"};
        }
    }
    [[nodiscard]] std::size_t some(char* at, std::size_t limit) const {
        wait();
        const auto count = ::read(in_, at, limit);
        if (count <= 0) {
            throw std::runtime_error{"the other process is gone"};
        }
        return static_cast<std::size_t>(count);
    }

    int in_;
    int out_;
};

/// A real process that runs `body(channel&)` and ends. What it throws is the text it leaves.
/// Killed with this object. Make it before the test starts threads.
class forked {
public:
    template <class Body>
    explicit forked(Body body) : channel_{-1, -1} {
        std::array<int, 2> down{};
        std::array<int, 2> up{};
        if (::pipe2(down.data(), O_CLOEXEC) != 0 || ::pipe2(up.data(), O_CLOEXEC) != 0) {
            throw std::runtime_error{"no pipes"};
        }
        process_ = ::fork();
        if (process_ == 0) {
            ::close(down[1]);
            ::close(up[0]);
            ::signal(SIGPIPE, SIG_IGN);
            run(body, channel{down[0], up[1]});
        }
        ::close(down[0]);
        ::close(up[1]);
        channel_ = channel{up[0], down[1]};
    }
    forked(const forked&) = delete;
    forked& operator=(const forked&) = delete;
    ~forked() { kill(); }

    [[nodiscard]] pid_t process() const noexcept { return process_; }
    [[nodiscard]] channel& to() noexcept { return channel_; }
    void signal(int number) const { ::kill(process_, number); }
    /// SIGSTOP, and waits until it has stopped.
    void stop() const {
        ::kill(process_, SIGSTOP);
        int status = 0;
        ::waitpid(process_, &status, WUNTRACED);
    }
    void resume() const { ::kill(process_, SIGCONT); }
    void kill() noexcept {
        if (process_ > 0) {
            ::kill(process_, SIGKILL);
            ::waitpid(std::exchange(process_, -1), nullptr, 0);
        }
    }

private:
    template <class Body>
    [[noreturn]] static void run(Body& body, channel ends) {
        try {
            body(ends);
        } catch (const std::exception& failed) {
            ends.put_text(failed.what());
        }
        ::_exit(0);
    }

    pid_t process_ = -1;
    channel channel_;
};

}  // namespace tests
