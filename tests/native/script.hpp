// Does what a text says, one line at a time, so that the test that wrote the text knows what must be in the file.
#pragma once

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "../../src/commlens/native/board.hpp"
#include "mapped.hpp"

namespace check {

struct Line {
  std::string verb, text;
  std::vector<int64_t> numbers;
};

inline std::vector<Line> read_script(const char* path) {
  std::ifstream file(path);
  std::vector<Line> lines;
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    Line line;
    words >> line.verb;
    for (int64_t number; words >> number;) line.numbers.push_back(number);
    const size_t brace = text.find('{');
    if (brace != std::string::npos) line.text = text.substr(brace);
    line.numbers.resize(16);
    lines.push_back(line);
  }
  if (lines.empty()) fail("%s says nothing", path);
  return lines;
}

// A box, by these lines; blobs and records are named by their number, from 1.
class BoxPlayer {
 public:
  explicit BoxPlayer(char* map) : at_(Geometry::of(map)), box_(map, at_.capacity, at_.side_at, at_.side_size, at_.epoch) {
    positions_.reserve(1000);
    offsets_.reserve(1000);
  }

  void play(const Line& line) {
    const auto& n = line.numbers;
    auto u = [&n](size_t i) { return static_cast<uint64_t>(n[i]); };
    auto at = [this, &n] { return offsets_[static_cast<size_t>(n[0])]; };
    if (line.verb == "append") {
      positions_.push_back(box_.append(line.text));
    } else if (line.verb == "announce") {
      const uint64_t index = box_.next_index();
      const Record record{index, u(0), positions_[u(1)], positions_[u(2)], positions_[u(3)], 0, u(4), u(5), u(6), n[7],
                          static_cast<uint32_t>(n[8]), static_cast<uint32_t>(n[9]), static_cast<int32_t>(n[10]), static_cast<uint32_t>(n[11])};
      offsets_.push_back(box_.announce(record));
    } else if (line.verb == "mark") {
      box_.mark(at(), u(1), u(0), u(2));
    } else if (line.verb == "value") {
      box_.mark_value(at(), u(1), u(0), u(2));
    } else if (line.verb == "outcome") {
      box_.mark_outcome(at(), u(0), u(1), u(2), u(3));
    } else if (line.verb == "began") {
      box_.wait_began(at(), u(0), u(1), u(2), n[3]);
    } else if (line.verb == "completed") {
      box_.wait_completed(at(), u(0), u(1), u(2));
    } else if (line.verb == "word") {
      box_.word(u(0), u(1));
    } else if (line.verb == "lost") {
      box_.lost(u(0));
    } else {
      fail("nobody knows what %s is", line.verb.c_str());
    }
  }

  void look(const std::vector<Line>&) const {}

 private:
  const Geometry at_;
  Box box_;
  std::vector<uint64_t> positions_{0}, offsets_{0};
};

// A rank's board, whose first channel Python has made.
class BoardPlayer {
 public:
  explicit BoardPlayer(char* map) : map_(map), board_(map) {}

  void play(const Line& line) {
    auto u = [&line](size_t i) { return static_cast<uint64_t>(line.numbers[i]); };
    if (line.verb == "announce")
      board_.announce(board::HEADER_SIZE, {u(0), u(1), u(2), u(3)});
    else if (line.verb == "withdraw")
      board_.withdraw(board::HEADER_SIZE, u(0));
    else
      fail("nobody knows what %s is", line.verb.c_str());
  }

  // The peers' reader in C++ takes nothing that was not said. Python's, which the states are for, says the rest.
  void look(const std::vector<Line>& lines) const {
    const PeerBoard peer(map_);
    for (const Line& line : lines) {
      uint64_t got = 0;
      const auto number = line.numbers[0];
      if (!peer.announced(board::HEADER_SIZE, static_cast<uint64_t>(number), got)) continue;
      const auto says = [&](const Line& said) {
        return said.verb == "announce" && said.numbers[0] == number && static_cast<uint64_t>(said.numbers[1]) == got;
      };
      if (std::none_of(lines.begin(), lines.end(), says)) fail("number %llx is read to be %llx", wide(static_cast<uint64_t>(number)), wide(got));
    }
  }

 private:
  char* const map_;
  Board board_;
};

}  // namespace check
