"""What models do while they load is recorded, carried out alike, and refused where it cannot be recorded."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tensorcast_connector.client.checkpoint import Checkpoint  # noqa: E402
from tensorcast_connector.client.files import encode_file_header  # noqa: E402
from tensorcast_connector.core.artifact import TensorSpec  # noqa: E402
from tensorcast_connector.engines.weights.attributes import Attributes  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import Copy, LoadPlan, Untraceable, overlap, trace  # noqa: E402
from tensorcast_connector.engines.weights.load_sources import Files, Pooled, Source, parts, rows  # noqa: E402
from tensorcast_connector.engines.weights.peer_source import bounds, union  # noqa: E402

Weights = Iterable[tuple[str, torch.Tensor]]
HIDDEN, HEADS, WIDTH, VOCAB, EXPERTS, INNER = 64, 8, 16, 300, 4, 96


class Attention(nn.Module):
    """One rank's fused qkv and its output, sliced as vLLM's linear layers do it, and a padded vocabulary with a tied head."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: "torch.dtype" = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.rows = rank, HEADS * WIDTH // ranks
        self.qkv = nn.Parameter(torch.full((3 * self.rows, HIDDEN), -1, dtype=dtype), requires_grad=False)
        self.out = nn.Parameter(torch.full((HIDDEN, self.rows), -1, dtype=dtype), requires_grad=False)
        self.vocab = -(-VOCAB // ranks // 64) * 64
        self.embed = nn.Parameter(torch.full((self.vocab, HIDDEN), -1, dtype=dtype), requires_grad=False)
        self.head = self.embed
        self.norm = nn.Parameter(torch.full((HIDDEN,), -1, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), -1, dtype=torch.float32), requires_grad=False)

    def load_weights(self, weights: Weights) -> set[str]:
        seen = set()
        for name, tensor in weights:
            if name in "qkv":
                target = self.qkv.data.narrow(0, "qkv".index(name) * self.rows, self.rows)
                target.copy_(tensor.narrow(0, self.rank * self.rows, self.rows))
                seen.add("qkv")
            elif name == "out":
                self.out.data.copy_(tensor.narrow(1, self.rank * self.rows, self.rows))
                seen.add(name)
            elif name == "embed":
                start = self.rank * self.vocab
                mine = tensor.narrow(0, start, min(self.vocab, VOCAB - start))
                self.embed[: mine.shape[0]].data.copy_(mine)
                self.embed[mine.shape[0] :].data.fill_(0)
                seen.add(name)
            elif name == "scale":
                self.scale.data.fill_(tensor.item())
                seen.add(name)
            elif name == "norm":
                self.norm.data.copy_(tensor.to(self.norm.device))
                seen.add(name)
        return seen


class Experts(nn.Module):
    """Experts of which each has gate, up and down; the second rank of two has their second halves."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER // 2, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        half = INNER // 2
        for name, tensor in weights:
            kind, _, number = name.partition(".")
            if kind == "w2":
                self.w2.data[int(number)].copy_(tensor[:, half:])
            elif kind in ("w1", "w3"):
                target = self.w13.data[int(number)]
                target.narrow(0, 0 if kind == "w1" else half, half).copy_(tensor.chunk(2)[1])


ATTENTION = {
    "q": (HEADS * WIDTH, HIDDEN), "k": (HEADS * WIDTH, HIDDEN), "v": (HEADS * WIDTH, HIDDEN), "out": (HIDDEN, HEADS * WIDTH),
    "embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "scale": (1,), "unused": (1024, HIDDEN),
}  # fmt: skip
EXPERT = {
    f"{kind}.{number}": (HIDDEN, INNER) if kind == "w2" else (INNER, HIDDEN)
    for number in range(EXPERTS) for kind in ("w1", "w2", "w3")
}  # fmt: skip


def written(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: "torch.dtype" = torch.bfloat16) -> Path:
    """A checkpoint of random tensors."""
    name = str(dtype).removeprefix("torch.")
    specs = [TensorSpec(key, "float32" if key == "scale" else name, shape, 0) for key, shape in shapes.items()]
    header, order = encode_file_header(specs)
    torch.manual_seed(1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for each in order:
            tensor = torch.randn(each.shape).to(getattr(torch, each.dtype))
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return folder


def sources(checkpoint: Checkpoint) -> list[Source]:
    files = Files(checkpoint, threads=2)
    return [files, Pooled("policy", dict(files.streamed()), threads=2)]


def load(model: nn.Module, source: Source, real_bytes: int = 1024) -> tuple[LoadPlan, int]:
    plan = trace(model, source.given, source.read, real_bytes)
    told: list[int] = []
    size = source.fill(plan.copies, told.append)
    assert not told or max(told) == size
    return plan, size


MAKERS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "one rank": (Attention, ATTENTION),
    "first of two ranks": (lambda: Attention(0, 2), ATTENTION),
    "second of two ranks": (lambda: Attention(1, 2), ATTENTION),
    "another dtype": (lambda: Attention(dtype=torch.float32), ATTENTION),
    "experts": (Experts, EXPERT),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MAKERS)
@pytest.mark.parametrize("kind", [0, 1], ids=["files", "pool"])
def test_a_plan_does_what_the_model_does(case: str, kind: int, tmp_path: Path) -> None:
    make, shapes = MAKERS[case]
    with Checkpoint.open(written(tmp_path, shapes)) as checkpoint:
        source = sources(checkpoint)[kind]
        expected, found = make(), make()
        loaded = expected.load_weights(source.streamed())
        plan, _ = load(found, source)
        assert plan.loaded == loaded and plan.copies
        for (name, one), other in zip(expected.named_parameters(), found.parameters(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


def test_a_rank_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    with Checkpoint.open(written(tmp_path, ATTENTION)) as checkpoint:
        source = Files(checkpoint, threads=1)
        plan, size = load(Attention(1, 2), source)
        whole = sum(checkpoint.tensors[name].bytes for name in ("q", "k", "v"))
        # The columns of `out` lie among those of the other rank, less than a row of which is read beyond what is needed.
        out = checkpoint.tensors["out"].bytes
        assert plan.bytes == whole // 2 + out // 2 + (VOCAB - plan_vocab(2)) * HIDDEN * 2
        assert size <= plan.bytes + out // 2


def plan_vocab(ranks: int) -> int:
    return Attention(0, ranks).vocab


def test_large_copies_are_cut_so_that_buffers_stay_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tensorcast_connector.engines.weights import load_sources

    monkeypatch.setattr(load_sources, "STAGE_BYTES", 1000)
    monkeypatch.setattr(load_sources, "STAGE_RUN_BYTES", 100)
    for case in MAKERS:
        make, shapes = MAKERS[case]
        folder = tmp_path / case
        folder.mkdir()
        with Checkpoint.open(written(folder, shapes)) as checkpoint:
            for source in sources(checkpoint):
                expected, found = make(), make()
                expected.load_weights(source.streamed())
                plan, _ = load(found, source)
                for copy in plan.copies:
                    for part in parts(copy):
                        assert load_sources.direct(part) or part.span[1] - part.span[0] <= 1000
                    assert all(part.bytes <= 1000 for part in rows(copy))
                for one, other in zip(expected.parameters(), found.parameters(), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), case


class Odd(nn.Module):
    """Loads "w" by `how`."""

    def __init__(self, how: "Callable[[Odd, torch.Tensor], object]") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.how = how
        self.kept: list[torch.Tensor] = []
        self.count = 0

    def load_weights(self, weights: Weights) -> None:
        self.count += 1
        for _, tensor in weights:
            self.how(self, tensor)


def _swallow(model: Odd, tensor: "torch.Tensor") -> None:
    try:
        model.w.data.copy_(tensor * 2)
    except Exception:
        model.w.data.zero_()


def _read_back(model: Odd, tensor: "torch.Tensor") -> None:
    model.w.data.copy_(tensor)
    model.w.data.sum()


def _overlapping(model: Odd, tensor: "torch.Tensor") -> None:
    model.w.data[:40].copy_(tensor[:40])
    model.w.data[20:].copy_(tensor[:44])


def _filled_after(model: Odd, tensor: "torch.Tensor") -> None:
    model.w.data.copy_(tensor)
    model.w.data[3:].fill_(0)


def _aside(model: Odd, tensor: "torch.Tensor") -> None:
    memory = torch.empty(64, 64)
    memory.copy_(tensor)
    model.w.data = memory


ODD: dict[str, tuple[Callable[[Odd, "torch.Tensor"], object], str]] = {
    "a value": (lambda model, tensor: tensor[0, 0].item(), "needs values of w"),
    "arithmetic": (lambda model, tensor: model.w.data.copy_(tensor * 2), "needs values of w"),
    "another dtype in between": (lambda model, tensor: model.w.data.copy_(tensor.to(torch.float16)), "needs values"),
    "a contiguous copy": (lambda model, tensor: model.w.data.copy_(tensor.t().contiguous()), "needs values"),
    "plain numbers": (lambda model, tensor: tensor.tolist(), "tolist"),
    "numpy": (lambda model, tensor: tensor.numpy(), "numpy"),
    "kept": (lambda model, tensor: model.kept.append(tensor[1:]), "keeps w"),
    "made a parameter": (
        lambda model, tensor: setattr(model, "w", nn.Parameter(tensor, requires_grad=False)),
        "keeps w",
    ),
    "caught": (_swallow, "needs values of w"),
    "read back": (_read_back, "uses a parameter that w was to be copied to"),
    "overlapping": (_overlapping, "uses a parameter"),
    "filled after": (_filled_after, "uses a parameter"),
    "aside": (_aside, "memory that is not the model's"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_cannot_be_recorded_is_refused(case: str, tmp_path: Path) -> None:
    how, words = ODD[case]
    with Checkpoint.open(written(tmp_path, {"w": (64, 64)}, torch.float32)) as checkpoint:
        source = Files(checkpoint, threads=1)
        model = Odd(how)
        attributes = Attributes(model)
        with pytest.raises(Untraceable, match=words):
            trace(model, source.given, source.read, 0)
        assert attributes.changed(model)
        attributes.restore()
        assert not attributes.changed(model) and model.count == 0 and not model.kept


def test_the_last_of_two_copies_to_one_place_counts(tmp_path: Path) -> None:
    with Checkpoint.open(written(tmp_path, {"a": (64, 64), "b": (64, 64)}, torch.float32)) as checkpoint:
        source = Files(checkpoint, threads=1)
        model = Odd(lambda model, tensor: model.w.data.copy_(tensor))
        load(model, source, 0)
        assert torch.equal(model.w, source.read("b"))


def test_what_the_model_itself_finds_wrong_is_said(tmp_path: Path) -> None:
    def wrong(model: Odd, tensor: torch.Tensor) -> None:
        assert tensor.shape == model.w.shape, f"a tensor of {tuple(tensor.shape)}"

    with Checkpoint.open(written(tmp_path, {"w": (64, 65)}, torch.float32)) as checkpoint:
        source = Files(checkpoint, threads=1)
        with pytest.raises(Untraceable, match=r"a tensor of \(64, 65\)"):
            trace(Odd(wrong), source.given, source.read, 0)


def test_overlap_is_exact_for_boxes_of_one_tensor() -> None:
    whole = torch.zeros(6, 8, 10)
    flat = torch.arange(whole.numel()).view(whole.shape)
    boxes = [
        (slice(a, a + 2), slice(b, b + 3), slice(c, c + 4)) for a in (0, 1, 3) for b in (0, 2, 4) for c in (0, 3, 6)
    ]
    for one in boxes:
        for other in boxes:
            common = bool(set(flat[one].reshape(-1).tolist()) & set(flat[other].reshape(-1).tolist()))
            assert overlap(whole[one], whole[other]) == common, (one, other)
    assert not overlap(whole[:, 1], whole[:, 2]) and overlap(whole[:, 1], whole[2])
    assert overlap(whole, whole.view(torch.int32)[3:]) and not overlap(whole[:2].view(torch.uint8), whole[3:])


def test_attributes_that_changed_are_named_and_made_as_they_were() -> None:
    model = Odd(lambda model, tensor: None)
    model.seen = {"a"}
    attributes = Attributes(model)
    assert attributes.changed(model) == []
    model.seen.add("b")
    model.count = 5
    model.w.loaded = True
    model.new = 1
    assert attributes.changed(model) == ["count", "new", "seen", "w's own.loaded"]
    attributes.restore()
    assert attributes.changed(model) == [] and model.seen == {"a"} and model.count == 0
    model.w = nn.Parameter(torch.zeros(64, 64))
    assert attributes.changed(model)


def test_boxes_of_what_is_needed_are_no_larger_than_they_must_be() -> None:
    whole = torch.arange(6 * 8 * 10).view(6, 8, 10)
    spec = TensorSpec("w", "int64", (6, 8, 10), 0)

    def of(view: torch.Tensor) -> Copy:
        return Copy("w", view.dtype, view.storage_offset(), tuple(view.shape), view.stride(), torch.empty(view.shape))

    assert bounds(of(whole[1:3, 2:5, 4:9]), spec) == ((1, 3), (2, 5), (4, 9))
    assert bounds(of(whole[2, :, 3]), spec) == ((2, 3), (0, 8), (3, 4))
    assert bounds(of(whole.permute(2, 0, 1)[1:4, 2:4]), spec) == ((2, 4), (0, 8), (1, 4))
    assert bounds(of(whole[3:4].expand(5, 8, 10)), spec) == ((3, 4), (0, 8), (0, 10))
    assert bounds(of(whole.view(48, 10)[9:20]), spec) == ((1, 3), (0, 8), (0, 10))
    assert bounds(of(whole.view(torch.float32)[2:3]), spec) == ((0, 6), (0, 8), (0, 10))
    assert bounds(of(torch.tensor(3)), TensorSpec("w", "int64", (), 0)) == ()
    assert union([((1, 3), (0, 2)), ((2, 6), (1, 4))]) == ((1, 6), (0, 4))


def test_a_stage_copies_through_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcast_connector.engines.weights import load_sources

    monkeypatch.setattr(load_sources, "STAGE_BYTES", 100)
    given, target, stage = torch.randn(7, 33), torch.zeros(7, 33), load_sources.Stage()
    stage.send(target, given)
    stage.finish()
    assert torch.equal(target, given)


def test_progress_tells_rate_and_remaining_time(caplog: pytest.LogCaptureFixture) -> None:
    from tensorcast_connector.engines.weights.load_sources import Progress

    seconds = 0.0
    progress = Progress("a model", 4_000_000_000, lambda: seconds)
    with caplog.at_level("INFO", "tensorcast_connector"):
        progress(100)
        seconds = 10.0
        progress(1_000_000_000)
        progress(1_100_000_000)
    assert [each.getMessage() for each in caplog.records] == ["a model: 1.0 of 4.0 GB, 0.10 GB/s, 30 s left"]
