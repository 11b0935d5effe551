// Moves bytes between the ranks of a communicator, over sockets, for the device thread. Nothing here is seen by torch's dispatcher.
#pragma once

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

namespace nccl_like {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// What two ranks must agree on before data moves. The kernel of a rank that finds another header never ends, as NCCL's does. NCCL does
// not send the type and the reduction: each rank applies its own to the bytes that it gets, so ranks that differ in them get wrong values.
struct Header {
  int64_t kind = 0, root = -1, count = 0;
  int64_t to_you = 0, from_you = 0;  // bytes

  bool agrees_with(const Header& theirs) const {
    return kind == theirs.kind && root == theirs.root && count == theirs.count && to_you == theirs.from_you && from_you == theirs.to_you;
  }
};

enum class Message : int64_t { COLLECTIVE = 1, SEND = 2, RECV = 3, DATA = 4 };

// A mesh of sockets between the ranks of one communicator. Its constructor is the rendezvous: it blocks until all ranks are there.
class Mesh {
 public:
  Mesh(c10d::Store& store, const std::string& key, int rank, int size, Milliseconds timeout, const std::atomic<bool>& aborted)
      : rank_(rank), peers_(size), aborted_(aborted) {
    deadline_ = Clock::now() + timeout;
    if (size == 1) return;
    const char* named = std::getenv("NCCL_LIKE_HOST");
    const std::string host = named ? named : "127.0.0.1";
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = address_of(host, 0);
    socklen_t length = sizeof address;
    TORCH_CHECK(
        listener >= 0 && !bind(listener, reinterpret_cast<sockaddr*>(&address), length) && !listen(listener, size) &&
            !getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length),
        "nccl_like cannot listen on ", host, ": ", std::strerror(errno));
    try {
      store.set(key + "/" + std::to_string(rank), host + ":" + std::to_string(ntohs(address.sin_port)));
      for (int peer = 0; peer < rank; ++peer) connect_to(store, key, peer);
      for (int left = size - 1 - rank; left > 0; --left) accept_from(listener, key);
    } catch (...) {
      close(listener);
      throw;
    }
    close(listener);
  }

  ~Mesh() {
    for (auto& peer : peers_)
      if (peer.fd >= 0) close(peer.fd);
  }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  bool lost_a_peer() const { return lost_a_peer_.load(); }

  void post(int to, Message message, const void* data, size_t length) {
    if (to == rank_) {
      peers_[to].box(message).emplace_back(static_cast<const char*>(data), length);
      return;
    }
    const int64_t frame[2] = {static_cast<int64_t>(message), static_cast<int64_t>(length)};
    auto& out = peers_[to].out;
    out.append(reinterpret_cast<const char*>(frame), sizeof frame);
    out.append(static_cast<const char*>(data), length);
  }

  bool has(int from, Message message) { return !peers_[from].box(message).empty(); }

  std::string take(int from, Message message) {
    auto& box = peers_[from].box(message);
    std::string first = std::move(box.front());
    box.pop_front();
    return first;
  }

  bool all_sent() const {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.fd < 0 || peer.out.empty(); });
  }

  // Send and receive what is possible now; wait for it at most 20 ms.
  void pump() {
    std::vector<pollfd> waits;
    std::vector<Peer*> whose;
    for (auto& peer : peers_) {
      if (peer.fd < 0) continue;
      waits.push_back({peer.fd, static_cast<short>(POLLIN | (peer.out.empty() ? 0 : POLLOUT)), 0});
      whose.push_back(&peer);
    }
    if (waits.empty()) {
      std::this_thread::sleep_for(Milliseconds(5));
      return;
    }
    if (poll(waits.data(), waits.size(), 20) <= 0) return;
    for (size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents & POLLOUT) send_some(*whose[i]);
      if (waits[i].revents & (POLLIN | POLLHUP | POLLERR)) receive_some(*whose[i]);
    }
  }

 private:
  struct Peer {
    int fd = -1;
    std::string out, in;
    std::deque<std::string> boxes[4];
    std::deque<std::string>& box(Message message) { return boxes[static_cast<int64_t>(message) - 1]; }
  };

  static sockaddr_in address_of(const std::string& host, int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    TORCH_CHECK(inet_pton(AF_INET, host.c_str(), &address.sin_addr) == 1, "NCCL_LIKE_HOST must be an IPv4 address, not ", host);
    return address;
  }

  void check_time(const std::string& key) const {
    if (!aborted_.load() && Clock::now() < deadline_) return;
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("[", rank_, "] is setting up NCCL communicator ", key, aborted_.load() ? ", which was aborted" : ", and not all ranks joined in time"));
  }

  // Asks again and again instead of waiting in the store, so that the other threads can use it meanwhile.
  void connect_to(c10d::Store& store, const std::string& key, int peer) {
    const std::string theirs = key + "/" + std::to_string(peer);
    while (!store.check({theirs})) {
      check_time(key);
      std::this_thread::sleep_for(Milliseconds(5));
    }
    const auto value = store.get(theirs);
    const std::string text(value.begin(), value.end());
    const auto colon = text.rfind(':');
    sockaddr_in address = address_of(text.substr(0, colon), std::stoi(text.substr(colon + 1)));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int32_t me = rank_;
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || ::send(fd, &me, sizeof me, MSG_NOSIGNAL) != sizeof me) {
      if (fd >= 0) close(fd);
      C10_THROW_ERROR(DistBackendError, c10::str("[", rank_, "] cannot reach rank ", peer, " of NCCL communicator ", key));
    }
    keep(peer, fd);
  }

  void accept_from(int listener, const std::string& key) {
    int fd = -1;
    int32_t who = -1;
    while (true) {
      pollfd wait{listener, POLLIN, 0};
      if (poll(&wait, 1, 20) > 0 && (fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)) >= 0) break;
      check_time(key);
    }
    if (recv(fd, &who, sizeof who, MSG_WAITALL) != sizeof who || who <= rank_ || who >= size()) {
      close(fd);
      C10_THROW_ERROR(DistBackendError, c10::str("[", rank_, "] a stranger called at NCCL communicator ", key));
    }
    keep(who, fd);
  }

  void keep(int peer, int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    peers_[peer].fd = fd;
  }

  void send_some(Peer& peer) {
    const ssize_t sent = ::send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) peer.out.erase(0, static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) lose(peer);
  }

  void receive_some(Peer& peer) {
    char buffer[1 << 16];
    const ssize_t got = ::recv(peer.fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      lose(peer);
      return;
    }
    if (got < 0) return;
    peer.in.append(buffer, static_cast<size_t>(got));
    size_t at = 0;
    while (peer.in.size() - at >= 16) {
      int64_t frame[2];
      std::memcpy(frame, peer.in.data() + at, sizeof frame);
      if (peer.in.size() - at - sizeof frame < static_cast<size_t>(frame[1])) break;
      peer.box(static_cast<Message>(frame[0])).push_back(peer.in.substr(at + sizeof frame, static_cast<size_t>(frame[1])));
      at += sizeof frame + static_cast<size_t>(frame[1]);
    }
    peer.in.erase(0, at);
  }

  // A rank that is gone: whoever waits for it waits on.
  void lose(Peer& peer) {
    close(peer.fd);
    peer.fd = -1;
    lost_a_peer_.store(true);
  }

  const int rank_;
  std::vector<Peer> peers_;
  const std::atomic<bool>& aborted_;
  Clock::time_point deadline_;
  std::atomic<bool> lost_a_peer_{false};
};

// A communicator: the mesh, what ends its kernels, and what a profiler plugin calls it.
struct Communicator {
  std::atomic<bool> aborted{false};
  std::unique_ptr<Mesh> mesh;
  void* profiled = nullptr;
};

}  // namespace nccl_like
