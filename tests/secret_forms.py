"""Ways to write a secret into a URL. No client can reach any of them: ports are closed."""

from __future__ import annotations

import re
from urllib.parse import unquote

_HOST = "127.0.0.1:1"
_AKIA = "AKIAZQ3EXAMPLE7KEY42"
_HF = "hf_ZqWxSecretTokenAbCdEf0123456789"
_PW = "Zx9qS3cretW0rd"

# what is written -> the parts of it that must never be seen again
FORMS: dict[str, tuple[str, ...]] = {
    # object storage: the client takes no credentials there
    f"s3://{_AKIA}:{_PW}@bucket/x.jsonl": (_AKIA, _PW),
    f"s3a://{_AKIA}:{_PW}@bucket/x.jsonl": (_AKIA, _PW),
    f"s3://{_AKIA}:Zx9qS3c/W0rdK8v@bucket/x.jsonl": (_AKIA, "Zx9qS3c", "W0rdK8v"),
    f"s3://{_AKIA}:Zx9qS3c@W0rdK8v@bucket/x.jsonl": (_AKIA, "Zx9qS3c", "W0rdK8v"),
    f"s3://{_AKIA}:Zx9qS3c+W0rd%2FK8vTq@bucket/x": (_AKIA, "Zx9qS3c", "W0rd/K8vTq", "K8vTq"),
    f"gs://{_PW}@bucket/x.jsonl": (_PW,),
    f"az://account:{_PW}@container/x.jsonl": (_PW,),
    f"abfss://container:{_PW}@account.dfs.core.windows.net/x.jsonl": (_PW,),
    f"hf://{_HF}@datasets/owner/name": (_HF,),
    f"hf://user:{_HF}@datasets/owner/name/x.jsonl": (_HF,),
    f"hf://datasets/owner/name/x.jsonl?token={_HF}": (_HF,),
    f"s3://bucket/x.jsonl?X-Amz-Security-Token={_PW}": (_PW,),
    f"s3://bucket/x.jsonl?key={_AKIA}&secret={_PW}": (_AKIA, _PW),
    f"s3://bucket/x.jsonl#{_PW}": (_PW,),
    f"memory://place/x.jsonl?token={_PW}": (_PW,),
    # user and password
    f"http://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"HTTP://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"http://{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"http://:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"http://user:Zx9qS3c@W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9qS3c/W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9qS3c?W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9qS3c#W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9qS3c W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9qS3c'W0rdK8v@{_HOST}/x.jsonl": ("Zx9qS3c", "W0rdK8v"),
    f"http://user:Zx9q%40S3cret%2FW0rd@{_HOST}/x": ("Zx9q%40", "Zx9q@S3cret/W0rd", "S3cret"),
    f"http://user%3A{_PW}%40{_HOST}/x.jsonl": (_PW,),
    f"http://user:{_PW}@[::1]:1/x.jsonl": (_PW,),
    f"ftp://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"sftp://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"webhdfs://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    # the query, the fragment, parameters of the path
    f"http://{_HOST}/x.jsonl?X-Amz-Credential={_AKIA}&X-Amz-Signature={_PW}": (_AKIA, _PW),
    f"http://{_HOST}/x.jsonl?AWSAccessKeyId={_AKIA}&Signature=Zx9qS3c%2BW0rd%3D": (
        _AKIA,
        "Zx9qS3c%2BW0rd",
        "Zx9qS3c+W0rd",
    ),
    f"http://{_HOST}/x.jsonl?sv=2024-01-01&sig={_PW}": (_PW,),
    f"http://{_HOST}/x.jsonl?{_PW}": (_PW,),
    f"http://{_HOST}/x.jsonl#access_token={_PW}": (_PW,),
    f"http://{_HOST}/x.jsonl#{_PW}": (_PW,),
    f"http://{_HOST}/x.jsonl;session={_PW}": (_PW,),
    # one URL in another
    f"simplecache::http://user:{_PW}@{_HOST}/x.jsonl": (_PW,),
    f"zip://x.jsonl::http://user:{_PW}@{_HOST}/x.zip": (_PW,),
    f"http://{_HOST}/proxy/https://user:{_PW}@host/x.jsonl": (_PW,),
    # no URL of another machine at all
    f"file://user:{_PW}@host/x.jsonl": (_PW,),
}
assert len(FORMS) >= 30


def seen(text: str, secrets: tuple[str, ...]) -> list[str]:
    """Which of the secrets the text holds, as they are, URL-decoded or broken over lines."""
    plain = re.sub(r"\s+", "", text)
    texts = (text, unquote(text), plain, unquote(plain))
    return [secret for secret in secrets if any(secret in each for each in texts)]
