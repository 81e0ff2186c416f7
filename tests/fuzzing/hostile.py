"""Values that nobody should pass, and somebody will."""

from __future__ import annotations

TEXTS: tuple[str, ...] = (
    "", " ", "-", "--", "-1", "0", "1", "00", "1.5", "1e3", "1e308", "1e999", "-1e999", "nan", "inf", "-inf",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "-9223372036854775809", "9" * 30,
    "9" * 5000, "0x10", "1_000", "１２", "true", "false", "none", "null", "auto", "size:inf", "size:nan",
    "size:1e400", "size:-1", "size:", "every-0", "every--1", "every-" + "9" * 40, "op-", "op-every-0",
    "1,2,3", ",", ",,,", "=", "a=b=c", "a=", "=b", "=>", "a=>b", "=> a=b", "gpus=x => batch=1",
    "batch=1 => batch=2", "layers=nan", "x" * 100_000, "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb",
    "a\rb", "\t", "a\x7fb", "\u202egnp.exe", "\u2028", "ä", "数", "🙂", "\udcff", "..", "../..", "/",
    "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "~", "a/" * 3000, "n" * 300, "%s%n%d", "{}",
    "{0}", "$(id)", "`id`", "'", '"', '"a', "\\", ";", "#", "*", "[bold]", "[/x]", "[", ":smile:", "<script>",
    "|", "a|b", "HYBRID_SHARD", "block", "10000000000", "2147483648", "1000000000", "seed=1,kernels=nan",
    "kernels=1", "80GB", "1e400GB", "GB", "...GB", "host:99999", "a:b",
)  # fmt: skip
BYTES: tuple[bytes, ...] = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[31m", b"\n", b"\"", b"'''", b"[", b"]", b"[[", b"{", b"}",
    b"=", b",", b".", b"nan", b"inf", b"-", b"1e999", b"9" * 5000, b"[" * 2000, b"a." * 5000, b"\xe4",
    b"\\u0000", b"\\ud800", b"18446744073709551615", b"#", b"x" * 1_000_000,
)  # fmt: skip
