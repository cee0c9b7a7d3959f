"""The character sets that are allowed in untrusted text, so that a message cannot select an arbitrary Python
codec.

Python finds a codec by name and imports it. Some take quadratic time (`punycode`: 400 KB took 17 seconds),
others are not text at all. Those listed here take linear time, as `tests/bench/strangers.py` measures.
`tests/unit/test_charsets.py` finds every other place where a name would choose a codec.
"""

from encodings import normalize_encoding
from encodings.aliases import aliases

FALLBACK = "utf_8"
MAX_NAME = 40

CODECS = frozenset(
    (
        "ascii", "utf_8", "utf_7", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be",
        "utf_32_le", "latin_1", "iso8859_2", "iso8859_3", "iso8859_4", "iso8859_5", "iso8859_6",
        "iso8859_7", "iso8859_8", "iso8859_9", "iso8859_10", "iso8859_11", "iso8859_13",
        "iso8859_14", "iso8859_15", "iso8859_16", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254",
        "cp1255", "cp1256", "cp1257", "cp1258", "cp437", "cp737", "cp775", "cp850", "cp852",
        "cp855", "cp857", "cp858", "cp860", "cp861", "cp862", "cp863", "cp864", "cp865", "cp866",
        "cp869", "cp874", "cp1125", "koi8_r", "koi8_u", "koi8_t", "kz1048", "ptcp154", "tis_620",
        "hp_roman8", "mac_cyrillic", "mac_greek", "mac_iceland", "mac_latin2", "mac_roman",
        "mac_turkish", "big5", "big5hkscs", "cp950", "gb2312", "gbk", "gb18030", "hz", "cp932",
        "shift_jis", "shift_jis_2004", "shift_jisx0213", "euc_jp", "euc_jis_2004", "euc_jisx0213",
        "iso2022_jp", "iso2022_jp_1", "iso2022_jp_2", "iso2022_jp_2004", "iso2022_jp_3",
        "iso2022_jp_ext", "euc_kr", "cp949", "johab", "iso2022_kr",
    )
)  # fmt: skip


def codec_of(charset: str) -> str | None:
    """Return the Python codec for a character set, or `None` if the character set is not allowed."""
    if len(charset) > MAX_NAME or not charset.isascii():
        return None
    name = normalize_encoding(charset.strip().lower())
    name = aliases.get(name, name)
    return name if name in CODECS else None


def text_of(octets: bytes, charset: str) -> str:
    """Decode bytes in this character set; invalid bytes are replaced, and an unknown set is read as UTF-8."""
    return octets.decode(codec_of(charset) or FALLBACK, "replace")
