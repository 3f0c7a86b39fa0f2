"""A URL and a text can be shown to anybody; what is no secret stays as it was."""

from __future__ import annotations

import copy
import json
import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill import urls
from shardmill.errors import OptionError, ShardmillError, StoreNotFoundError
from shardmill.remote.folder import open_folder
from shardmill.sources import open_source
from shardmill.urls import Url, remember, remember_options, safe_cause, scrub
from tests.secret_forms import FORMS, seen

SECRET = "Zx9qS3cretW0rd"


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch) -> None:
    monkeypatch.setattr(urls, "_known", {})


@pytest.mark.parametrize(("text", "secrets"), FORMS.items(), ids=[*FORMS])
def test_no_form_of_a_url_shows_its_secret(text, secrets) -> None:
    url = Url(text)
    again = pickle.loads(pickle.dumps(url))
    for words in (str(url), repr(url), f"{url}", f"{url!s:>9}", f"{[url]}", str(url.refusal)):
        assert not seen(words, secrets)
    assert url.reveal() == text == again.reveal()
    assert url == again == copy.deepcopy(url)
    with pytest.raises(TypeError):
        json.dumps(url)


@pytest.mark.parametrize(("text", "secrets"), FORMS.items(), ids=[*FORMS])
def test_no_error_shows_the_secret_of_its_url(text, secrets) -> None:
    """As a client words it: quoted, decoded, in parts, as a Path."""
    url = Url(text)
    inner = text.partition("://")[2]
    parts = f"Cannot open {inner!r} of {url.reveal()!r}: no {inner.split('@')[0]}"
    for words in (
        text,
        f"x: {text}: gone",
        parts,
        text.replace("://", ":/"),
        f"<{text}>, ({text})",
    ):
        error = StoreNotFoundError(words)
        assert not seen(f"{error} {error!r} {error.args}", secrets)
        assert not seen(scrub(words), secrets)
        assert safe_cause(OSError(words)) is None


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/me@home/x.jsonl",
        "s3://bucket/part-?.jsonl",
        "s3://bucket/year=202?/month=1/*.jsonl",
        "s3://bucket/c#/x.jsonl",
        "s3://bucket/c#.jsonl",
        "file:///data/me@home/2%20#x?y=1&z",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/me@home",
        "hf://datasets/owner/name@refs%2Fconvert/x.parquet",
        "hf://gpt2@main/config.json",
        "abfss://container@account.dfs.core.windows.net/x.jsonl",
        "https://host.org/@me/x.jsonl",
        "http://localhost:9000/bucket/me@home",
        "http://[::1]:9000/x.jsonl",
        "simplecache::s3://bucket/x.jsonl",
        "memory://a/b",
        "data/me@home/x?y#z.jsonl",
        "C:/me@home/x",
    ],
)
def test_urls_without_secrets_are_shown_unchanged(text) -> None:
    url = Url(text)
    assert (str(url), scrub(text), scrub(f"{text}: gone")) == (text, text, f"{text}: gone")
    assert url.refusal is None
    assert "/".join(url.names) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("{'Authorization': 'AWS4 Credential=a/b, Signature=c'}", "{'Authorization': '***'}"),
        ("token hf_abcdefghijklmnopqrstuvwx is not valid", "token *** is not valid"),
        ("AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE&x", "AWSAccessKeyId=***&x"),
        ("<AWSAccessKeyId>abc</AWSAccessKeyId>", "<AWSAccessKeyId>***</AWSAccessKeyId>"),
        ("key AKIAIOSFODNN7EXAMPLE does not exist", "key *** does not exist"),
        ("X-Amz-Signature=0123abcd", "X-Amz-Signature=***"),
        ("aws_secret_access_key = ab/cd+ef=", "aws_secret_access_key = ***"),
        ('{"secret": "x1", "key": "y2"}', '{"secret": "***", "key": "***"}'),
        ("key=k1 secret=s2 token=t3 password=1234", "key=*** secret=*** token=*** password=***"),
        ("https://h.org/x?sig=a%2Bb: Forbidden", "https://h.org/x: Forbidden"),
        ("(https://h.org/x?sig=a).", "(https://h.org/x)."),
    ],
)
def test_secrets_are_removed_from_messages_of_clients(text, wanted) -> None:
    assert scrub(text) == wanted
    assert scrub(wanted) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "token=1,234: the store has 99",
        "text_key='body': no such field; hf_revision, hf_name_or_path",
        "eos_token=</s>, pad_token_id=0",
        "no credentials: Unable to locate credentials; set AWS_ACCESS_KEY_ID",
        "data/token=abc/x.jsonl: no such file",
        "s3://bucket/x: not there; wanted hf://datasets/owner/name[@revision]",
    ],
)
def test_messages_without_secrets_are_unchanged(text) -> None:
    assert scrub(text) == text
    assert str(ShardmillError(text)) == text


@given(
    user=st.text(string.ascii_letters, max_size=8),
    password=st.text(string.ascii_letters + string.digits + "/@:?#%&=+-_.~!$ ", min_size=1),
    scheme=st.sampled_from(["http", "https", "s3", "ftp", "gs"]),
)
def test_a_password_may_hold_anything(user, password, scheme) -> None:
    text = f"{scheme}://{user}:Q7{password}7Q@host.org/x.jsonl"
    assert str(Url(text)) == f"{scheme}://host.org/x.jsonl"


@given(st.text())
def test_scrubbing_is_idempotent(text) -> None:
    assert scrub(scrub(text)) == scrub(text)
    assert scrub(scrub(f"http://{text}")) == scrub(f"http://{text}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        *(
            "-",
            "a",
            "a.b-c_",
            "secret",
            "Authorization",
            "http://a:",
            "x@",
            "::http:/",
            "https://a/",
        ),
        *("eyJ", "-eyJaaaaaaaaaa", "hf_", "%40", "#", "?a", "key=", "http://a@b?c=d ", "a:b", "'"),
    ],
)
def test_a_long_hostile_text_is_read_in_one_pass(part) -> None:
    """Where it is not, this takes hours, and the limit of a test ends it."""
    many = part * (60_000 // len(part))
    for text in (many, f"http://{many}", f"s3://{many}.", f"s3://k:{many}@b"):
        assert len(scrub(text)) <= len(text) * 3 + 9
        assert scrub(str(Url(text))) == scrub(str(Url(text)))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        (f"s3://key:{SECRET}@bucket/x.jsonl", "AWS_ACCESS_KEY_ID"),
        (f"s3://bucket/x.jsonl?secret={SECRET}", "AWS_PROFILE"),
        (f"simplecache::s3://key:{SECRET}@bucket/x.jsonl", "storage_options"),
        (f"gs://{SECRET}@bucket/x.jsonl", "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"az://account:{SECRET}@container/x.jsonl", "AZURE_STORAGE"),
        (f"hf://user:{SECRET}@datasets/owner/name/x.jsonl", "HF_TOKEN"),
        (f"file://user:{SECRET}@host/x.jsonl", "leave it out"),
    ],
)
def test_credentials_in_a_url_are_refused_with_a_remedy(url, where) -> None:
    is_far = url.startswith(("s3:", "gs:", "az:", "hf:"))  # the others are names of files here
    for opened in (open_folder, open_source) if is_far else (open_folder,):
        with pytest.raises(OptionError, match=where) as error:
            opened(url)
        assert SECRET not in str(error.value)


def test_options_of_a_client_are_hidden_wherever_they_occur() -> None:
    nested = {"key": "theKey123", "client_kwargs": {"aws_session_token": "tokTok99"}, "anon": False}
    remember_options({**nested, "secret": SECRET, "endpoint_url": f"http://u:{SECRET}Two@h.org"})
    remember_options(None)
    shown = scrub(f"no theKey123, tokTok99, {SECRET} and {SECRET}Two; anon False")
    assert shown == "no ***, ***, *** and ***; anon False"


def test_the_number_of_remembered_secrets_is_bounded() -> None:
    for number in range(3_000):
        remember(f"http://user:Passw0rd{number:05}@host.org/x")
    assert len(urls._known) <= 1_000
    assert "Passw0rd02999" not in scrub("the word is Passw0rd02999")
