from pathlib import Path

import pytest

from drover.errors import SpecError
from drover.spec import InferenceCluster, Model, TokenRef, Toleration
from drover.spec_file import load

WHOLE = """\
apiVersion: drover.dev/v1alpha1
kind: InferenceCluster
metadata:
  name: herd
  labels: {team: a}
spec:
  model:
    source: models/m.gguf
    sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
    alias: m
  context: 4096
  parallel: 2
  cacheTypes: {k: q8_0, v: f16}
  workers:
    - name: big
      device: cuda
      memory: 24GiB
      port: 50052
    - name: small
      replicas: 2
      threads: 4
      memory: 4294967296
      cache: {enabled: true}
  split:
    proportions: [6, 1, 1.5]
  serving:
    host: 0.0.0.0
    port: 9000
    apiKey: secret
"""
LEAST = """\
apiVersion: drover.dev/v1alpha1
kind: InferenceCluster
metadata: {name: herd}
spec:
  model: {source: m.gguf, secretRef: {name: t}, storage: {size: 10Gi}}
  workers:
    - name: w
"""
KUBERNETES = """\
      resources: {limits: {memory: 8Gi, cpu: 4}}
      cache: {size: 20Gi, storageClassName: fast}
      tolerations: [{key: gpu, operator: Exists}]
      affinity: {nodeAffinity: {}}
      env: [{name: A, value: b}]
      podTemplate: {metadata: {annotations: {a: b}}}
  network: {allowFrom: [{podSelector: {}}]}
  expose: {type: NodePort}
  suspend: true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "two.yaml"


def parse(file: Path, text: str) -> InferenceCluster:
    file.write_text(text)
    return load(file)


def refusal(file: Path, text: str) -> str:
    with pytest.raises(SpecError) as error:
        parse(file, text)
    return str(error.value).replace(f"{file}", "two.yaml")


def test_every_field(file: Path) -> None:
    spec = parse(file, WHOLE).spec
    assert (spec.model.source, spec.model.alias, spec.context, spec.parallel) == ("models/m.gguf", "m", 4096, 2)
    assert (spec.cache_types.k, spec.cache_types.v) == ("q8_0", "f16")
    big, small = spec.workers
    assert (big.name, big.device, big.memory, big.port, big.replicas, big.threads) == (
        "big",
        "cuda",
        24 << 30,
        50052,
        1,
        None,
    )
    assert (small.replicas, small.threads, small.memory, small.cache.enabled) == (2, 4, 4 << 30, True)
    assert spec.split.proportions == [6, 1, 1.5]
    assert (spec.serving.host, spec.serving.port, spec.serving.api_key) == ("0.0.0.0", 9000, "secret")


def test_defaults(file: Path) -> None:
    spec = parse(file, LEAST).spec
    (worker,) = spec.workers
    assert (worker.replicas, worker.device, worker.memory, worker.cache.enabled) == (1, "cpu", None, False)
    assert (spec.context, spec.parallel, spec.cache_types.k, spec.split.proportions) == (None, 1, "f16", None)
    assert (spec.serving.enabled, spec.serving.host, spec.serving.port) == (True, "127.0.0.1", 8080)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "memory: 24GiB",
            "memory: 4 gigs",
            "two.yaml:17: spec.workers[0].memory: '4 gigs' is not a size; write e.g. 4GiB",
        ),
        ("memory: 24GiB", "memory: 0", "two.yaml:17: spec.workers[0].memory: 0 is out of range; it must be above 0"),
        ("memory: 24GiB", "memory: true", "two.yaml:17: spec.workers[0].memory: True is not a whole number"),
        ("threads: 4", "threds: 4", "two.yaml:21: spec.workers[1].threds: unknown field; did you mean 'threads'?"),
        ("threads: 4", "threads: '4'", "two.yaml:21: spec.workers[1].threads: '4' is not a whole number"),
        ("threads: 4", "threads: 0", "two.yaml:21: spec.workers[1].threads: 0 is out of range; it must be at least 1"),
        (
            "device: cuda",
            "device: gpu",
            "two.yaml:16: spec.workers[0].device: 'gpu' is not one of 'cpu', 'cuda' or 'reference'",
        ),
        ("{enabled: true}", "{enabled: 1}", "two.yaml:23: spec.workers[1].cache.enabled: 1 is not true or false"),
        ("{enabled: true}", "yes", "two.yaml:23: spec.workers[1].cache: True is not a mapping"),
        (
            "{enabled: true}",
            "{keep: 1}",
            "two.yaml:23: spec.workers[1].cache.keep: unknown field; known are size, storageClassName, accessMode, ",
        ),
        ("threads: 4", "devicesPerWorker: 2", "two.yaml:21: spec.workers[1].devicesPerWorker: a cpu worker has one"),
        ("threads: 4", "tolerations: [{op: Exists}]", "two.yaml:21: spec.workers[1].tolerations[0].op: unknown field"),
        (
            "replicas: 2",
            "replicas: 900",
            "two.yaml:20: spec.workers[1].replicas: 900 is out of range; it must be ",
        ),
        ("apiKey: secret", "apiKeySecretRef: {name: k}", "two.yaml:29: spec.serving.apiKeySecretRef.key: is missing"),
        (
            "apiKey: secret",
            "apiKey: secret\n    apiKeySecretRef: {name: k, key: k}",
            "two.yaml:29: spec.serving.apiKey: stands beside apiKeySecretRef; keep one of them",
        ),
        (
            "port: 50052",
            "port: 70000",
            "two.yaml:18: spec.workers[0].port: 70000 is out of range; it must be at most 65535",
        ),
        ("port: 9000", "port: 9e3", "two.yaml:28: spec.serving.port: '9e3' is not a whole number"),
        ("apiKey: secret", "apiKey: 12", "two.yaml:29: spec.serving.apiKey: 12 is not text (quote it)"),
        ("apiKey: secret", "apiKey: ''", "two.yaml:29: spec.serving.apiKey: must not be empty"),
        (
            "apiKey: secret",
            "api_key: secret",
            "two.yaml:29: spec.serving.api_key: unknown field; did you mean 'apiKey'?",
        ),
        ("name: herd", "name: My Herd", "two.yaml:4: metadata.name: 'My Herd' does not match"),
        ("k: q8_0", "k: q4", "two.yaml:13: spec.cacheTypes.k: 'q4' is not one of 'f32', 'f16', 'bf16', "),
        ("name: small", "name: big", "two.yaml:19: spec.workers[1].name: 'big' names two groups"),
        ("[6, 1, 1.5]", "[6, 1]", "two.yaml:25: spec.split.proportions: 2 numbers for 3 workers; give one for each"),
        ("[6, 1, 1.5]", "[0, 0, 0]", "two.yaml:25: spec.split.proportions: at least one must be above 0"),
        (
            "[6, 1, 1.5]",
            "[6, -1, 1]",
            "two.yaml:25: spec.split.proportions[1]: -1 is out of range; it must be at least 0",
        ),
        ("[6, 1, 1.5]", "[]", "two.yaml:25: spec.split.proportions: must not be empty"),
        (
            "source: models/m.gguf",
            "source: hf://a/b/c.safetensors",
            "two.yaml:8: spec.model.source: 'hf://a/b/c.safetensors' does not look like hf://ORG/REPO/FILE.gguf[@REVISION]",
        ),
        ("source: models/m.gguf", "alis: m", "two.yaml:7: spec.model.source: is missing"),
        ("sha256: 0", "sha256: x", "two.yaml:9: spec.model.sha256: "),
        ("name: big", "name: [big]", "two.yaml:15: spec.workers[0].name: ['big'] is not text (quote it)"),
        ("  context: 4096", "  context: 4096\n  context: 1", "two.yaml:12: spec.context: stands here twice"),
        ("  labels", "  1: x\n  labels", "two.yaml:5: metadata: every key must be plain text"),
        ("drover.dev/v1alpha1", "apps/v1", "two.yaml:1: apiVersion: expected drover.dev/v1alpha1, found 'apps/v1'"),
        (
            "kind: InferenceCluster",
            "kind: Deployment",
            "two.yaml:2: kind: expected InferenceCluster, found 'Deployment'",
        ),
        ("kind: InferenceCluster\n", "", "two.yaml:1: kind: expected InferenceCluster, found missing"),
        ("metadata:", "metadata: [", "two.yaml:5: not valid YAML: "),
        ("    alias: m", "\talias: m", "two.yaml:10: not valid YAML: "),
        ("alias: m", "alias: !!python/object:os.system x", "two.yaml:10: not valid YAML: "),
        ("alias: m", "alias: 2024-13-45", "two.yaml: not valid YAML: month must be in 1..12"),
    ],
)
def test_a_fault_names_the_line_and_the_field(file: Path, old: str, new: str, message: str) -> None:
    assert old in WHOLE
    assert refusal(file, WHOLE.replace(old, new, 1)).startswith(message)


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        ("models/m.gguf", ""),
        ("/srv/m.gguf", ""),
        ("hf://org/repo/file.gguf", "hf"),
        ("hf://org/repo/folder/file-00001-of-00003.gguf@v1.0", "hf"),
        ("https://example.com/m.gguf?download=true", "https"),
        ("pvc://models/folder/m.gguf", "pvc"),
        ("ollama://llama3.2:1b", "ollama"),
        ("ollama://user/name", "ollama"),
    ],
)
def test_sources(source: str, scheme: str) -> None:
    assert Model(source=source).scheme == scheme


@pytest.mark.parametrize(
    "source",
    [
        "hf://org/m.gguf",
        "hf://org/repo/m.bin",
        "http://example.com/m.gguf",
        "https://example.com",
        "s3://bucket/m.gguf",
        "pvc://models",
        "pvc://models/../m.gguf",
        "pvc://models//m.gguf",
        "ollama://",
    ],
)
def test_sources_that_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"does not look like|unknown scheme"):
        Model(source=source)


def test_what_only_kubernetes_uses(file: Path) -> None:
    spec = parse(file, LEAST + KUBERNETES).spec
    (group,) = spec.workers
    assert (group.resources.limits, group.cache.size, group.cache.retain) == (
        {"memory": "8Gi", "cpu": 4},
        20 << 30,
        True,
    )
    assert group.tolerations == [Toleration(key="gpu", operator="Exists")]
    assert (spec.model.secret_ref, spec.model.storage.size) == (TokenRef(name="t"), 10 << 30)
    assert spec.network.allow_from == [{"podSelector": {}}]
    assert (spec.expose.type, spec.suspend, spec.devices) == ("NodePort", True, 1)


def test_every_fault_has_a_line_of_its_own_in_the_order_of_the_file(file: Path) -> None:
    text = WHOLE.replace("24GiB", "much").replace("4096", "none").replace("9000", "-1")
    assert [line.split(": ")[:2] for line in refusal(file, text).splitlines()] == [
        ["two.yaml:11", "spec.context"],
        ["two.yaml:17", "spec.workers[0].memory"],
        ["two.yaml:28", "spec.serving.port"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "two.yaml: the file is empty"),
        ("# nothing\n", "two.yaml: the file is empty"),
        ("- a\n", "two.yaml:1: expected a mapping with apiVersion"),
        ("text", "two.yaml:1: expected a mapping with apiVersion"),
        (LEAST + "---\n" + LEAST, "two.yaml:9: a second document starts here"),
        ("a: &a\n  b: *a\n", "two.yaml:"),
        ("[" * 5000, "two.yaml"),
        ("a: " * 40, "two.yaml:1: not valid YAML"),
        ("{a: " * 40 + "1" + "}" * 40, "two.yaml:1: a.a."),
        ("\0", "two.yaml: not valid YAML"),
    ],
)
def test_files_that_hold_something_else(file: Path, text: str, message: str) -> None:
    assert refusal(file, text).startswith(message)


def test_many_aliases_do_not_fill_memory(file: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "too many fields" in refusal(file, "\n".join(rows))


def test_files_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    for path, reason in ((file, "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SpecError, match=reason):
            load(path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="byte 0 is not UTF-8"):
        load(file)
