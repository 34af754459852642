// An engine in C++: attaches to a node, loads a chunk of KV cache, or computes and stores it, and compares the bytes.
//
// Usage: engine SOCKET, where SOCKET is a node's attach.sock. It prints `stored` if no tier had the chunk, and then
// `loaded from TIER`; its exit status is 0 if the bytes are those that it computes itself. The contract, step by step:
// docs/reference/engine-protocol.md. A real engine keeps its attachment for its whole life, sends a ping when nothing
// arrives, attaches again when the connection is lost, and computes what it cannot load.

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "google/rpc/status.pb.h"
#include "lmkv/v1/engine_service.pb.h"

namespace {

using lmkv::v1::Act;
using lmkv::v1::AttachRequest;
using lmkv::v1::AttachResponse;
using lmkv::v1::Event;
using lmkv::v1::Extent;
using lmkv::v1::FoundChunks;
using lmkv::v1::HeldChunk;
using lmkv::v1::KvSpec;
using std::string;

constexpr int layer_count = 2, kv_head_count = 2, head_size = 8, chunk_size = 16;
constexpr int element_count = layer_count * kv_head_count * 2 * chunk_size * head_size;
constexpr std::size_t chunk_bytes = element_count * sizeof(float);
constexpr int timeout_seconds = 30;
constexpr std::size_t max_frame_bytes = 1 << 20;

[[noreturn]] void fail(const string& text) { throw std::runtime_error(text); }

// ---- Spec, keys and checksum: pure functions

string little_endian(std::uint32_t number) {
  string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(number >> shift & 0xFF));
  return bytes;
}

string pack(const std::vector<string>& fields) {
  string packed;
  for (const string& field : fields) packed += little_endian(static_cast<std::uint32_t>(field.size())) + field;
  return packed;
}

const unsigned char* raw(const string& bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

string digest(const string& bytes) {
  unsigned char full[SHA256_DIGEST_LENGTH];
  SHA256(raw(bytes), bytes.size(), full);
  return {reinterpret_cast<char*>(full), 16};
}

KvSpec make_spec() {
  KvSpec spec;
  spec.set_model_name("toy");
  spec.set_model_id("toy");  // a digest of the weights, in a real engine
  spec.set_kv_dtype("float32");
  spec.set_layer_count(layer_count);
  spec.set_kv_head_count(kv_head_count);
  spec.set_head_size(head_size);
  spec.set_chunk_size(chunk_size);
  spec.set_format(lmkv::v1::KV_FORMAT_TOKEN_MAJOR);
  spec.set_hash_scheme("sha256-16");
  const auto field = [](const char* name, auto value) { return name + ("=" + std::to_string(value)); };
  spec.set_fingerprint(digest("lmkv.KvSpec" + pack({  // by name
      field("block_size", 0), field("chunk_size", chunk_size), field("format", static_cast<int>(spec.format())),
      "hash_scheme=" + spec.hash_scheme(), field("head_size", head_size), "kv_dtype=" + spec.kv_dtype(),
      field("kv_head_count", kv_head_count), field("layer_count", layer_count), "mla=False",
      "model_id=" + spec.model_id(), "tile_backend=", "tile_isa="})));
  return spec;
}

// The root of all key chains of a spec, without cluster secret, cache salt and LoRA adapter.
string root_key(const string& fingerprint) {
  const string text = "lmkv.sha256-16" + pack({fingerprint, "", ""});
  unsigned char full[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  HMAC(EVP_sha256(), "", 0, raw(text), text.size(), full, &size);
  return {reinterpret_cast<char*>(full), 16};
}

string chunk_key(string parent, const std::vector<std::uint32_t>& tokens) {
  for (const std::uint32_t token : tokens) parent += little_endian(token);
  return digest(parent);
}

std::uint64_t checksum(const char* bytes, std::size_t size_bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < size_bytes / 8; ++i) {
    std::uint64_t word;  // little-endian, as the host must be
    std::memcpy(&word, bytes + 8 * i, 8);
    const auto position = static_cast<std::uint32_t>(i + 1);
    const std::uint32_t low = static_cast<std::uint32_t>(word) + position * 0x9E3779B1U;
    const std::uint32_t high = static_cast<std::uint32_t>(word >> 32) + position * 0x85EBCA77U;
    sum += word + static_cast<std::uint64_t>(low) * high;
  }
  return sum;
}

// What a model would compute: [layer][kv head][key, value][token][head size].
std::vector<float> compute(const std::vector<std::uint32_t>& tokens) {
  std::vector<float> kv(element_count);
  for (int i = 0; i < element_count; ++i) {
    kv[i] = static_cast<float>(i) + 0.5F * static_cast<float>(tokens[i / head_size % chunk_size]);
  }
  return kv;
}

// ---- Unix sockets

// A connected socket, whose reads and writes fail after `timeout_seconds`.
class Socket {
 public:
  explicit Socket(const string& path) : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) fail("the path of a socket is too long: " + path);
    std::memcpy(address.sun_path, path.data(), path.size());
    const timeval timeout{timeout_seconds, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      const string reason = std::strerror(errno);
      close(fd_);
      fail("no connection to " + path + ": " + reason);
    }
  }
  Socket(const Socket&) = delete;
  ~Socket() { close(fd_); }

  int fd() const { return fd_; }

  // Sends all bytes; false if the connection is broken.
  bool send_all(const string& bytes) const {
    for (std::size_t sent = 0; sent < bytes.size();) {
      const ssize_t count = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return false;
      sent += static_cast<std::size_t>(count);
    }
    return true;
  }

  // Receives `size` bytes; false if the connection ends, or they do not arrive in time.
  bool receive_all(char* bytes, std::size_t size) const {
    for (std::size_t received = 0; received < size;) {
      const ssize_t count = recv(fd_, bytes + received, size - received, 0);
      if (count <= 0) return false;
      received += static_cast<std::size_t>(count);
    }
    return true;
  }

 private:
  int fd_;
};

// ---- The node's pool, mapped. Its connection stays open as long as the memory is used.

class Pool {
 public:
  Pool(const string& path, const string& engine_id, std::int64_t epoch, std::size_t size_bytes)
      : size_bytes_(size_bytes), connection_(path) {
    const string hello =
        "{\"engine_id\": \"" + engine_id + "\", \"rank\": 0, \"epoch\": " + std::to_string(epoch) + "}\n";
    if (!connection_.send_all(hello)) fail("no connection to " + path);
    const int fd = receive_fd();
    void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) fail("the pool cannot be mapped");
    memory_ = static_cast<char*>(memory);
  }
  ~Pool() { munmap(memory_, size_bytes_); }

  // The bytes of an extent.
  char* at(const Extent& extent) const {
    const auto end = static_cast<std::uint64_t>(extent.offset()) + static_cast<std::uint64_t>(extent.size_bytes());
    if (extent.region() != 0 || extent.offset() < 0 || extent.size_bytes() < 0 || end > size_bytes_) {
      fail("the extent is not in the pool");
    }
    return memory_ + extent.offset();
  }

 private:
  int receive_fd() const {
    string line;
    int fd = -1;
    while (line.empty() || line.back() != '\n') {
      char data[4096];
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)];
      iovec part{data, sizeof data};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t count = recvmsg(connection_.fd(), &message, MSG_CMSG_CLOEXEC);
      if (count <= 0) fail("the node does not send its pool");
      line.append(data, static_cast<std::size_t>(count));
      const cmsghdr* head = CMSG_FIRSTHDR(&message);
      if (head != nullptr && head->cmsg_type == SCM_RIGHTS) std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    }
    if (fd < 0) fail("the node refuses its pool: " + line);
    return fd;
  }

  std::size_t size_bytes_;
  Socket connection_;
  char* memory_ = nullptr;
};

// ---- The stream to the node: frames of one byte of kind, four bytes of length (big endian), and the payload

enum class FrameKind : char { message = 0, status = 1, ping = 2, pong = 3 };

class Attachment {
 public:
  Attachment(const string& socket, const KvSpec& spec) : connection_(socket) {
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    Act act;
    act.mutable_hello()->set_engine_id("cpp-" + std::to_string(getpid()) + "-" + std::to_string(now));
    *act.mutable_hello()->mutable_spec() = spec;
    act.mutable_hello()->set_worker_count(1);
    send(act);
    const auto welcome = await(&Event::has_welcome).welcome();
    pool_ = std::make_unique<Pool>(welcome.pool_socket(), act.hello().engine_id(), welcome.epoch(),
                                   static_cast<std::size_t>(welcome.pool_size_bytes()));
  }

  const Pool& pool() const { return *pool_; }

  // Looks a prompt up. One request runs at a time here, so that the next answer is its own.
  FoundChunks lookup(const string& lookup_id, const string& keys, int reserve_count) {
    Act act;
    auto* lookup = act.mutable_lookup();
    lookup->set_lookup_id(lookup_id);
    lookup->set_chunk_keys(keys);
    lookup->set_reserve_count(reserve_count);
    send(act);
    return await(&Event::has_found).found();
  }

  // Where the first write credit is, once the node has answered the request for it.
  Extent credit() {
    const Event event = await(&Event::has_granted);
    if (event.granted().credits().empty()) fail("the node has no room");
    return event.granted().credits(0).extent();
  }

  // The first chunk behind those in the pool, once it has arrived there.
  HeldChunk load(const string& lookup_id, int first_chunk) {
    Act act;
    auto* load = act.mutable_load();
    load->set_lookup_id(lookup_id);
    load->set_first_chunk(first_chunk);
    load->set_chunk_count(1);
    load->mutable_timeout()->set_seconds(timeout_seconds / 2);
    send(act);
    const Event event = await(&Event::has_loaded);
    if (event.loaded().chunks().empty()) fail("not loaded: " + event.loaded().status().message());
    return event.loaded().chunks(0);
  }

  void commit(const string& key, const Extent& credit) {
    Act act;
    auto* commit = act.mutable_commit()->add_chunks();
    commit->set_chunk_key(key);
    commit->set_offset(credit.offset());
    commit->set_size_bytes(chunk_bytes);  // that of the credit is rounded up
    commit->set_checksum(checksum(pool_->at(credit), chunk_bytes));
    commit->set_token_count(chunk_size);
    send(act);  // has no answer, unless it is refused
  }

  void release(const string& lookup_id) {
    Act act;
    act.mutable_release()->set_lookup_id(lookup_id);
    send(act);
  }

  // Ends the stream, and reads the answers that are ready; the destructor then gives the pool back.
  void end() {
    shutdown(connection_.fd(), SHUT_WR);
    for (AttachResponse rest; receive(&rest);) keep(rest);
    for (const Event& event : events_)
      if (event.has_rejected_commit()) fail(event.rejected_commit().status().message());
  }

 private:
  // A write that fails is followed by the end of what can be read, perhaps with the reason.
  void send(const Act& act) {
    AttachRequest request;
    *request.add_acts() = act;
    send_frame(FrameKind::message, request.SerializeAsString());
  }

  void send_frame(FrameKind kind, const string& payload) {
    string frame(1, static_cast<char>(kind));
    for (int shift = 24; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(payload.size() >> shift & 0xFF));
    connection_.send_all(frame + payload);
  }

  // The next message; false if the node has ended the stream without an error.
  bool receive(AttachResponse* response) {
    while (true) {
      unsigned char head[5];
      if (!connection_.receive_all(reinterpret_cast<char*>(head), sizeof head)) return false;
      const std::size_t size = std::size_t{head[1]} << 24 | head[2] << 16 | head[3] << 8 | head[4];
      if (size > max_frame_bytes) fail("the node sends a frame that is too large");
      string payload(size, '\0');
      if (!connection_.receive_all(payload.data(), size)) return false;
      switch (static_cast<FrameKind>(head[0])) {
        case FrameKind::message:
          if (!response->ParseFromString(payload)) fail("the node sends what is no message");
          return true;
        case FrameKind::status: {
          google::rpc::Status status;
          status.ParseFromString(payload);
          fail("the node ends the stream: " + status.message());
        }
        case FrameKind::ping:
          send_frame(FrameKind::pong, "");
          break;
        case FrameKind::pong:
          break;
        default:
          fail("the node sends a frame of an unknown kind");
      }
    }
  }

  void keep(const AttachResponse& response) {
    events_.insert(events_.end(), response.events().begin(), response.events().end());
  }

  // Removes the first event of a kind, once it is there. Events of other kinds stay, also unknown ones.
  Event await(bool (Event::*is_wanted)() const) {
    while (true) {
      for (auto event = events_.begin(); event != events_.end(); ++event) {
        if (!((*event).*is_wanted)()) continue;
        Event wanted = *event;
        events_.erase(event);
        return wanted;
      }
      AttachResponse response;
      if (!receive(&response)) fail("the stream has ended, or the node does not answer");
      keep(response);
    }
  }

  Socket connection_;
  std::vector<Event> events_;
  std::unique_ptr<Pool> pool_;
};

void run(const string& socket) {
  const KvSpec spec = make_spec();
  std::vector<std::uint32_t> tokens(chunk_size);
  std::iota(tokens.begin(), tokens.end(), 0U);
  const string key = chunk_key(root_key(spec.fingerprint()), tokens);
  const std::vector<float> kv = compute(tokens);

  Attachment node(socket, spec);
  string lookup_id = "1";
  FoundChunks found = node.lookup(lookup_id, key, 1);
  if (found.own().empty() && found.runs().empty()) {  // a miss, which the node has released
    const Extent credit = node.credit();
    std::memcpy(node.pool().at(credit), kv.data(), chunk_bytes);
    node.commit(key, credit);
    std::puts("stored");
    lookup_id = "2";
    found = node.lookup(lookup_id, key, 0);
  }
  if (found.own().empty() && found.runs().empty()) fail("the chunk was stored and is not found");
  const bool is_own = !found.own().empty();
  const HeldChunk chunk = is_own ? found.own(0) : node.load(lookup_id, 0);
  const char* bytes = node.pool().at(chunk.extent());
  if (chunk.extent().size_bytes() != static_cast<std::int64_t>(chunk_bytes)) fail("the chunk has another size");
  if (std::memcmp(bytes, kv.data(), chunk_bytes) != 0) fail("the bytes differ");
  if (chunk.checksum() != checksum(bytes, chunk_bytes)) fail("the checksum differs");
  std::printf("loaded from %s\n", is_own ? "own" : found.runs(0).tier().c_str());
  node.release(lookup_id);
  node.end();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s SOCKET\n", argv[0]);
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine: error: %s\n", error.what());
    return 1;
  }
}
