"""JSON that engines take although it is none by the book."""

import json
import random

import pytest

from smetric_router.errors import BadRequest
from smetric_router.state.loose_json import PARSED_BYTES_MAX, mended, parsed
from smetric_router.state.requests import CHAT_PATH, RequestReader

READER = RequestReader(chunk_bytes=64)


def chat(*contents: str, more: str = "") -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return f'{{"model": "m", "messages": {json.dumps(messages)}{more}}}'.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb'"a\ud83d"', rb'"a\ufffd"'),
        (rb'"\uD83Dx"', rb'"\ufffdx"'),
        (rb'"\ude00"', rb'"\ufffd"'),
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00\ude00"', rb'"\ufffd\ud83d\ude00\ufffd"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\\\\ud83d\\"', rb'"\\\\ud83d\\"'),
        (rb'"\ud83d\\ude00"', rb'"\ufffd\\ude00"'),
        (b'\xef\xbb\xbf"a"', b'"a"'),
        ('"ä"'.encode("utf-16"), '"ä"'.encode()),
        (b'"\xff"', b'"\xff"'),
    ],
)
def test_what_is_mended(text, expected):
    assert mended(text) == expected


def test_mended_texts_say_the_same_apart_from_halves_of_pairs():
    chance = random.Random(1)
    parts = ["\\ud83d", "\\ude00", "\\\\", "\\n", "u", "d83d", '\\"', "\\u0041", "\\uDBFF", "\\udc00"]
    for _ in range(5000):
        text = '"' + "".join(chance.choices(parts, k=chance.randrange(12))) + '"'
        read = json.loads(text)
        whole = "".join("\ufffd" if 0xD800 <= ord(each) < 0xE000 else each for each in read)
        assert json.loads(mended(text.encode())) == whole


def test_a_session_with_half_a_character_in_it_stays_a_session():
    """The history of the next turn begins with the same chunks."""
    first = READER.read(CHAT_PATH, chat("long " * 50 + "\ud83d", r"a \ backslash"))
    second = READER.read(CHAT_PATH, chat("long " * 50 + "\ud83d", r"a \ backslash", "and on"))
    assert (second.model, second.turn) == ("m", 1)
    assert second.chain.digests[: len(first.chain.digests)] == first.chain.digests
    plain = READER.read(CHAT_PATH, chat("long " * 50))
    assert second.chain.digests[0] == plain.chain.digests[0], "and what came before the half is the same as ever"


@pytest.mark.parametrize(
    "body",
    [
        chat("x", more=', "temperature": NaN'),
        chat("x", more=', "stop": [Infinity, -Infinity]'),
        b"\xef\xbb\xbf" + chat("x"),
        chat("x").decode().encode("utf-16"),
        chat("x").decode().encode("utf-32-le"),
    ],
)
def test_what_pythons_json_takes_is_the_engines_to_judge(body):
    json.loads(body)
    assert READER.read(CHAT_PATH, body).model == "m"
    assert READER.read("/v1/embeddings", body).model in ("m", "")


@pytest.mark.parametrize(
    "body",
    [b"", b'{"model": "m",}', b'{"model": NaM}', b'{"messages": "\\ud83"}', b"\xef\xbb\xbf", b"\xff\xfe{"],
)
def test_what_is_no_json_for_anybody_is_refused(body):
    with pytest.raises(ValueError, match=r"."):
        json.loads(body)
    with pytest.raises(BadRequest):
        READER.read(CHAT_PATH, body)


def test_no_more_than_a_megabyte_is_parsed_again():
    body = chat("x" * PARSED_BYTES_MAX, more=', "temperature": NaN')
    assert parsed(body) is None
    with pytest.raises(BadRequest):
        READER.read(CHAT_PATH, body)


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n\x00\xff\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (FORM, "whisper"),
        (FORM.replace(b'"model"\r\n', b'"model"\r\nContent-Type: text/plain\r\n'), "whisper"),
        (FORM.replace(b'name="model"', b'name="prompt"'), ""),
        (FORM.replace(b"whisper", b"x" * 5000), ""),
        (FORM[:150], ""),
        (b"\x00\x01binary", ""),
    ],
)
def test_the_model_of_a_form_is_read(body, model):
    assert READER.read("/v1/audio/transcriptions", body).model == model
