// The part of nlohmann's json that torch's FlightRecorderDetail.hpp uses. torch ships that header, but not this one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <list>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace nlohmann {

class json {
 public:
  json() = default;
  template <typename T, typename = std::enable_if_t<!std::is_same_v<std::decay_t<T>, json>>>
  json(const T& value) : text_(written(value)), is_object_(false) {}

  json& operator[](const std::string& key) { return members_[key]; }

  std::string dump() const {
    if (!is_object_) return text_;
    if (members_.empty()) return "null";
    std::string all;
    for (const auto& [key, value] : members_) all += (all.empty() ? "" : ",") + written(key) + ":" + value.dump();
    return "{" + all + "}";
  }

 private:
  static std::string written(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
      char code[8];
      if (c == '"' || c == '\\') out += std::string("\\") + c;
      else if (c == '\n') out += "\\n";
      else if (static_cast<unsigned char>(c) < 0x20) out += (std::snprintf(code, sizeof code, "\\u%04x", c), code);
      else out += c;
    }
    return out + "\"";
  }
  static std::string written(const char* text) { return written(std::string(text)); }
  static std::string written(bool value) { return value ? "true" : "false"; }
  static std::string written(const json& value) { return value.dump(); }
  template <typename T>
  static std::enable_if_t<std::is_arithmetic_v<T>, std::string> written(T value) {
    std::ostringstream out;
    out << value;
    return out.str();
  }
  template <typename A, typename B>
  static std::string written(const std::tuple<A, B>& pair) {
    return "[" + written(std::get<0>(pair)) + "," + written(std::get<1>(pair)) + "]";
  }
  template <typename List>
  static std::string listed(const List& list) {
    std::string all;
    for (const auto& each : list) all += (all.empty() ? "" : ",") + written(each);
    return "[" + all + "]";
  }
  template <typename T>
  static std::string written(const std::list<T>& list) {
    return listed(list);
  }
  template <typename T>
  static std::string written(const std::vector<T>& list) {
    return listed(list);
  }
  template <typename Map>
  static std::string mapped(const Map& map) {
    std::string all;
    for (const auto& [key, value] : map) all += (all.empty() ? "" : ",") + written(key) + ":" + written(value);
    return "{" + all + "}";
  }
  template <typename T>
  static std::string written(const std::map<std::string, T>& map) {
    return mapped(map);
  }
  template <typename T>
  static std::string written(const std::unordered_map<std::string, T>& map) {
    return mapped(map);
  }

  std::string text_;
  bool is_object_ = true;
  std::map<std::string, json> members_;
};

}  // namespace nlohmann
