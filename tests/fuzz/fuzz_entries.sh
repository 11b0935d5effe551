#!/usr/bin/env bash
# Fuzzes the C parser of Flight Recorder pickles under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/fuzz/fuzz_entries.sh SECONDS [DUMP...]     libFuzzer where there is clang, else simple mutations
# Not part of the test run, which has a small fuzzer of both readers (tests/unit/formats/flight_recorder/test_reader_native_entries.py).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:-60}
[ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/corpus"
(cd "$here/../unit" && "${PYTHON:-python3}" - "$work/corpus" <<'PYTHON'
import pickle, sys
from pathlib import Path
from flight_recorder_dumps import dump, entry
names = ["nccl:all_reduce", "nccl:send 0->1", "nccl:recv 0<-1", "nccl:coalesced"]
for count in (0, 1, 4):
    for protocol in (2, 4):
        value = dump([entry(n, names[n % 4], duration_ms=0.5 * n, frames=entry(0)["frames"] * n) for n in range(count)])
        Path(sys.argv[1], f"{count}-{protocol}").write_bytes(pickle.dumps(value, protocol))
PYTHON
)
for dump in "$@"; do cp "$dump" "$work/corpus/$(echo "$dump" | tr / _)"; done
flags=(-g -O1 -std=c11 -Wall -Wextra -fno-omit-frame-pointer -fno-sanitize-recover=all)
if command -v clang >/dev/null; then
    clang "${flags[@]}" -Wno-unused-function -fsanitize=fuzzer,address,undefined "$here/entries.c" -o "$work/fuzz"
    cd "$work" && ./fuzz -max_total_time="$seconds" -max_len=65536 -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 corpus
else
    gcc "${flags[@]}" -Wno-unused-function -fsanitize=address,undefined -DCOMMLENS_FUZZ_MAIN "$here/entries.c" -o "$work/fuzz"
    "$work/fuzz" "$seconds" "$work"/corpus/*
fi
