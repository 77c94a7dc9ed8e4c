"""ImageFolderHazard on miniature folders in the layout of the published archive."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset

from fulgurite.datamodules import ImageFolderHazard
from fulgurite.datamodules.base import DataModule, EpochSampler
from fulgurite.datamodules.common.images import disturb, read_image

SPLITS = ("train", "val", "calibration", "test")
CLASSES = ("COVID", "Lung_Opacity", "Normal", "Viral Pneumonia")
SIZES = (9, 10, 14, 7)
RADIOGRAPHY = "COVID-19_Radiography_Dataset"


def write_image(path, seed, size=(12, 12), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def radiography(tmp_path):
    """40 images with their masks and tables; returns the folder that holds the archive's top folder."""
    top = tmp_path / "data" / RADIOGRAPHY
    seed = 0
    for label, (name, size) in enumerate(zip(CLASSES, SIZES, strict=True)):
        for number in range(1, size + 1):
            seed += 1
            brightness = np.random.default_rng(seed).integers(60 * label, 60 * label + 50, (12, 12), dtype=np.uint8)
            for kind in ("images", "masks"):
                (top / name / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(brightness).save(top / name / "images" / f"{name}-{number}.png")
            Image.new("L", (12, 12), 255).save(top / name / "masks" / f"{name}-{number}.png")
        (top / f"{name}.metadata.xlsx").write_bytes(b"PK\x03\x04 a table")
    (top / "README.md.txt").write_text("about")
    return tmp_path / "data"


@pytest.fixture
def plain(tmp_path):
    """Ten images in each of two plain class folders, among files of other kinds."""
    for label, name in enumerate(("b", "a")):
        for number, suffix in enumerate([".png", ".PNG", ".jpg", ".jpeg", ".JPG"] * 2):
            write_image(tmp_path / "plain" / name / f"{number}{suffix}", 10 * label + number, size=(9, 12))
        (tmp_path / "plain" / name / "Thumbs.db").write_bytes(b"no image")
        (tmp_path / "plain" / name / "._0.png").write_bytes(b"no image")
    return tmp_path / "plain"


def samples(dataset):
    return [dataset[(0, i) if dataset.needs_epoch else i] for i in range(len(dataset))]


def indices(data, split):
    return [int(sample["index"]) for sample in samples(data.split(split))]


def all_indices(data):
    return sorted(index for split in SPLITS for index in indices(data, split))


@pytest.mark.parametrize("inside", [False, True])
def test_the_archive_is_read_without_masks_and_tables(radiography, inside):
    data = ImageFolderHazard(root=radiography / RADIOGRAPHY if inside else radiography, image_size=12)
    assert len(data.files) == sum(SIZES)
    assert {path.parent.name for path in data.files} == {"images"}
    assert data.class_names == list(CLASSES)
    assert data.labels.bincount().tolist() == list(SIZES)
    assert all(path.parent.parent.name == CLASSES[label] for path, label in zip(data.files, data.labels, strict=True))


def test_a_plain_folder_is_read_in_the_order_of_the_names(plain):
    data = ImageFolderHazard(root=plain, image_size=8)
    assert data.class_names == ["a", "b"]
    assert [path.relative_to(plain).as_posix() for path in data.files[:3]] == ["a/0.png", "a/1.PNG", "a/2.jpg"]
    assert len(data.files) == 20


@pytest.mark.parametrize(("in_channels", "n_features"), [(1, 400), (3, 1200)])
def test_sizes_are_known_at_construction_and_are_those_of_a_batch(radiography, in_channels, n_features):
    data = ImageFolderHazard(root=radiography, image_size=20, in_channels=in_channels, batch_size=5)
    assert (data.n_features, data.in_channels, data.n_classes) == (n_features, in_channels, 4)
    for loader in (data.train_dataloader(), data.calibration_dataloader(), data.predict_dataloader()):
        batch = next(iter(loader))
        assert batch["image"].shape == (5, in_channels, 20, 20)
        assert batch["image"].dtype == torch.float32
        assert batch["image"].is_contiguous()
        assert batch["label"].dtype == batch["index"].dtype == torch.int64
        assert batch["label"].shape == batch["index"].shape == (5,)


def test_classes_give_the_order_of_the_labels_and_may_leave_folders_out(radiography, caplog):
    order = ["Viral Pneumonia", "Normal", "COVID"]
    logging.getLogger("fulgurite").propagate = True
    with caplog.at_level(logging.INFO, logger="fulgurite"):
        data = ImageFolderHazard(root=radiography, classes=order)
    assert "left out the folders Lung_Opacity" in caplog.text
    assert data.class_names == order
    assert data.labels.bincount().tolist() == [7, 14, 9]
    for sample in samples(data.split("test")):
        assert data.files[sample["index"]].parent.parent.name == order[sample["label"]]


def test_the_splits_are_disjoint_cover_all_images_and_have_the_given_sizes(radiography):
    data = ImageFolderHazard(root=radiography, seed=3, image_size=4)
    assert [len(data.split(split)) for split in SPLITS] == [20, 4, 8, 8]
    assert all_indices(data) == list(range(40))
    assert indices(data, "predict") == indices(data, "test")
    fractions = {"val_fraction": 0.25, "calibration_fraction": 0.05, "test_fraction": 0.5}
    data = ImageFolderHazard(root=radiography, image_size=4, **fractions)
    assert [len(data.split(split)) for split in SPLITS] == [8, 10, 2, 20]


def test_the_seed_decides_the_splits(radiography):
    one, same, other = (ImageFolderHazard(root=radiography, seed=seed, image_size=4) for seed in (1, 1, 2))
    for split in SPLITS:
        assert indices(one, split) == indices(same, split)
    assert indices(one, "test") != indices(other, "test")


def test_every_image_is_as_likely_to_calibrate_as_to_test(radiography):
    counts = {split: np.zeros(40) for split in ("calibration", "test")}
    for seed in range(400):
        data = ImageFolderHazard(root=radiography, seed=seed)
        for split, count in counts.items():
            count[data.split(split).indices] += 1
    for count in counts.values():  # 80 of 400 expected, standard deviation 8
        assert np.abs(count - 80).max() < 4 * 8


def test_pixels_are_those_of_the_file_normalised_by_imagenet(radiography):
    data = ImageFolderHazard(root=radiography, image_size=12)
    grey = ImageFolderHazard(root=radiography, image_size=12, in_channels=1)
    plain = ImageFolderHazard(root=radiography, image_size=12, in_channels=1, mean=[0], std=[1])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for position, sample in enumerate(samples(data.split("test"))):
        pixels = torch.from_numpy(np.array(Image.open(data.files[sample["index"]]))) / 255
        expected = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        torch.testing.assert_close(sample["image"], expected)
        torch.testing.assert_close(plain.split("test")[position]["image"], pixels[None])
        torch.testing.assert_close(grey.split("test")[position]["image"], (pixels[None] - mean.mean()) / std.mean())


def test_an_image_of_any_shape_becomes_a_square(tmp_path):
    for name in ("a", "b"):
        for number, size in enumerate([(5, 30), (30, 5), (1, 1), (64, 64), (7, 7)] * 2):
            write_image(tmp_path / "shapes" / name / f"{number}.png", number, size=size)
    for split in SPLITS:
        data = ImageFolderHazard(root=tmp_path / "shapes", image_size=16)
        assert {tuple(sample["image"].shape) for sample in samples(data.split(split))} == {(3, 16, 16)}


MODES = {
    "1": (lambda image: Image.new("1", image.size, 1), 255, "png"),
    "L": (lambda image: image, 200, "png"),
    "palette": (lambda image: image.convert("P"), 200, "png"),
    "alpha": (lambda image: image.convert("RGBA"), 200, "png"),
    "grey with alpha": (lambda image: image.convert("LA"), 200, "png"),
    "CMYK": (lambda image: image.convert("RGB").convert("CMYK"), 200, "jpg"),
    "YCbCr": (lambda image: image.convert("YCbCr"), 200, "jpg"),
    "16 bits": (lambda image: Image.fromarray(np.full((6, 6), 200 * 257, np.uint16)), 200, "png"),
    "transparent": (lambda image: Image.new("RGBA", (6, 6), (200, 200, 200, 0)), 0, "png"),
    "half transparent": (lambda image: Image.new("RGBA", (6, 6), (200, 200, 200, 128)), 100, "png"),
}


@pytest.mark.parametrize(("make", "value", "suffix"), MODES.values(), ids=MODES)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_pixel_format_of_png_and_jpeg_is_read_on_one_scale(tmp_path, make, value, suffix, mode):
    path = tmp_path / f"x.{suffix}"
    make(Image.new("L", (6, 6), 200)).save(path)
    image = read_image(path, mode)
    assert image.mode == mode
    np.testing.assert_allclose(np.asarray(image), value, atol=1)


def test_a_transparent_palette_entry_becomes_black(tmp_path):
    image = Image.new("L", (6, 6), 200).convert("P")
    image.save(tmp_path / "x.png", transparency=image.getpixel((0, 0)))
    assert np.asarray(read_image(tmp_path / "x.png", "L")).max() == 0


@pytest.mark.parametrize("mode", ["F", "I"])
def test_a_pixel_format_without_a_range_is_refused_by_name(tmp_path, mode):
    path = tmp_path / "x.png"
    Image.new(mode, (6, 6)).save(path, format="TIFF")
    with pytest.raises(ValueError, match=f"x.png: the pixel format is '{mode}'; convert the image to 8-bit grey"):
        read_image(path, "RGB")


DAMAGED = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("this is no image"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "header only": lambda path: path.write_bytes(path.read_bytes()[:33]),
    "broken chunk": lambda path: path.write_bytes(path.read_bytes()[:37] + b"\0\0\0\0" + path.read_bytes()[41:]),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_image_is_an_error_that_names_the_file(radiography, damage):
    data = ImageFolderHazard(root=radiography, image_size=4)
    position, path = 3, data.files[data.split("calibration").indices[3]]
    damage(path)
    with pytest.raises(ValueError, match=rf"{path.name}: this image cannot be read .*give skip_unreadable: true"):
        data.split("calibration")[position]


def test_a_damaged_image_is_named_by_a_loader_process(radiography):
    data = ImageFolderHazard(root=radiography, image_size=4, num_workers=1)
    path = data.files[data.split("test").indices[0]]
    path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"{path.name}: this image cannot be read"):
        list(data.test_dataloader())


def test_unreadable_images_are_left_out_on_request_counted_and_named(radiography, caplog):
    everything = ImageFolderHazard(root=radiography, image_size=4)
    bad = [0, 17, 39]
    for index in bad:
        everything.files[index].write_bytes(b"no image")
    data = ImageFolderHazard(root=radiography, image_size=4, skip_unreadable=True)
    logging.getLogger("fulgurite").propagate = True
    with caplog.at_level(logging.WARNING, logger="fulgurite"):
        data.setup("fit")
    assert "left out 3 of 40 images that cannot be read" in caplog.text
    assert all(everything.files[index].name in caplog.text for index in bad)
    assert data.files == everything.files, "an index means the same file"
    assert all_indices(data) == [index for index in range(40) if index not in bad]


def test_skipping_changes_nothing_and_says_nothing_where_all_is_well(radiography, caplog):
    strict, lenient = (ImageFolderHazard(root=radiography, image_size=4, skip_unreadable=skip) for skip in (0, 1))
    logging.getLogger("fulgurite").propagate = True
    for split in SPLITS:
        assert indices(strict, split) == indices(lenient, split)
    assert not caplog.text


def test_a_class_without_a_readable_image_is_refused(radiography):
    for path in (radiography / RADIOGRAPHY / "COVID" / "images").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match="COVID holds no image that can be read"):
        ImageFolderHazard(root=radiography, skip_unreadable=True).setup("fit")


@pytest.mark.parametrize("name", ["nowhere", RADIOGRAPHY])
def test_a_missing_folder_is_named_with_what_is_expected_and_how_to_get_it(workspace, name):
    with pytest.raises(FileNotFoundError) as caught:
        ImageFolderHazard(root=f"data/{name}")
    message = str(caught.value)
    assert message.startswith(f"root is data/{name}; looked in {workspace / 'data' / name}: no such folder")
    assert ".png, .jpg, .jpeg" in message
    assert "COVID/images/COVID-1.png" in message
    parent = "data" if name == RADIOGRAPHY else "data/nowhere"
    assert f"tawsifurrahman/covid19-radiography-database --unzip -p {parent}" in message


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "x").write_text("a file")
    with pytest.raises(FileNotFoundError, match="x: a file"):
        ImageFolderHazard(root=tmp_path / "x")


def test_a_folder_without_two_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds 0 folders \(none\); expected one for each of at least two classes"):
        ImageFolderHazard(root=tmp_path)
    write_image(tmp_path / "only" / "1.png", 0)
    with pytest.raises(ValueError, match=r"holds 1 folders \(only\)"):
        ImageFolderHazard(root=tmp_path)


@pytest.mark.parametrize("inner", ["", "images", "masks"])
def test_an_empty_class_folder_is_refused(plain, inner):
    (plain / "c" / inner).mkdir(parents=True)
    if inner == "masks":
        write_image(plain / "c" / "masks" / "1.png", 0)
    with pytest.raises(ValueError, match=r"class folder .*c holds no image; put \.png"):
        ImageFolderHazard(root=plain)
    assert ImageFolderHazard(root=plain, classes=["a", "b"]).n_classes == 2


def test_images_in_both_places_are_refused(plain):
    write_image(plain / "a" / "images" / "1.png", 0)
    with pytest.raises(ValueError, match="a holds 10 images itself and 1 in images/"):
        ImageFolderHazard(root=plain)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"image_size": 0}, ValueError, "image_size is 0; give at least 1 pixel"),
        ({"in_channels": 2}, ValueError, r"in_channels is 2; give 1 \(grey\) or 3 \(RGB\)"),
        ({"val_fraction": 0.0}, ValueError, r"val_fraction is 0.0; give a share in \(0, 1\)"),
        ({"test_fraction": float("nan")}, ValueError, "test_fraction is nan"),
        ({"calibration_fraction": 1.0}, ValueError, "calibration_fraction is 1.0"),
        ({"val_fraction": 0.5, "test_fraction": 0.4}, ValueError, "are 0.5, 0.2, 0.4; give less than 1 in sum"),
        ({"classes": ["a"]}, ValueError, "give at least two different folders"),
        ({"classes": ["a", "a"]}, ValueError, "give at least two different folders"),
        ({"classes": ["a", "B"]}, FileNotFoundError, "has no folder 'B'; it has a, b"),
        ({"mean": [0.5]}, ValueError, r"mean is \[0.5\]; give 3 finite numbers"),
        ({"in_channels": 1, "std": [0.1, 0.2, 0.3]}, ValueError, "give 1 finite numbers"),
        ({"std": [0.1, 0.0, 0.1]}, ValueError, "give standard deviations above 0"),
        ({"mean": [0.1, float("inf"), 0.1]}, ValueError, "give 3 finite numbers"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
    ],
)
def test_arguments_out_of_range_are_refused(plain, arguments, error, message):
    with pytest.raises(error, match=message):
        ImageFolderHazard(root=plain, **arguments)


def test_too_few_images_for_the_splits_are_refused(plain):
    with pytest.raises(ValueError, match=r"20 images in .* make splits of .*'val': 0.*each needs at least one image"):
        ImageFolderHazard(root=plain, val_fraction=0.01).setup("fit")


def training_batches(root, epoch, seed=5, **arguments):
    data = ImageFolderHazard(root=root, image_size=12, batch_size=6, seed=seed, augment=True, **arguments)
    data.load_state_dict({"epoch": epoch, "batch": 0})
    batches = list(data.train_dataloader())
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("image", "label", "index")}


def by_index(fields):
    return fields["image"][fields["index"].argsort()]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmentation_depends_on_seed_epoch_and_image_but_not_on_the_processes(radiography, workers):
    reference = training_batches(radiography, epoch=1)
    again = training_batches(radiography, epoch=1, num_workers=workers)
    assert all(torch.equal(reference[name], again[name]) for name in reference)
    other = by_index(training_batches(radiography, epoch=2, num_workers=workers))
    assert (other != by_index(reference)).flatten(1).any(1).all(), "each image is disturbed anew in each epoch"


def test_a_resumed_epoch_sees_the_images_of_the_whole_one(radiography):
    whole = training_batches(radiography, epoch=3)
    for workers in (0, 2):
        data = ImageFolderHazard(
            root=radiography, image_size=12, batch_size=6, seed=5, augment=True, num_workers=workers
        )
        data.load_state_dict({"epoch": 3, "batch": 2})
        rest = torch.cat([batch["image"] for batch in data.train_dataloader()])
        assert torch.equal(rest, whole["image"][12:])


def test_only_training_images_are_augmented(radiography):
    plain, augmented = (ImageFolderHazard(root=radiography, image_size=12, augment=on) for on in (False, True))
    for split in ("val", "calibration", "test", "predict"):
        for one, other in zip(samples(plain.split(split)), samples(augmented.split(split)), strict=True):
            assert torch.equal(one["image"], other["image"])
    one, other = (samples(data.split("train")) for data in (plain, augmented))
    assert [sample["label"] for sample in one] == [sample["label"] for sample in other]
    assert not any(torch.equal(a["image"], b["image"]) for a, b in zip(one, other, strict=True))


def test_a_disturbance_is_a_flip_half_of_the_time_and_otherwise_small():
    size = 101
    left = np.zeros((size, size), np.uint8)
    left[45:56, 20:31] = 255  # a square, its centre 25 pixels left of the middle
    flipped, moved = [], []
    rows, columns = np.mgrid[:size, :size]
    for seed in range(400):
        image = np.asarray(disturb(Image.fromarray(left), np.random.default_rng(seed)), float)
        row, column = (image * rows).sum() / image.sum(), (image * columns).sum() / image.sum()
        flipped.append(column > 50)
        moved.append((row - 50, column - (75 if column > 50 else 25)))
    assert 0.4 < np.mean(flipped) < 0.6
    largest = np.abs(moved).max(0)
    turn = 25 * np.sin(np.radians(5))
    assert largest[0] < 0.05 * size + turn + 0.5
    assert largest[1] < 0.05 * size + 1
    assert (largest > 3).all()


def test_images_that_need_the_epoch_refuse_a_plain_index(radiography):
    plain, augmented = (ImageFolderHazard(root=radiography, augment=on).split("train") for on in (False, True))
    with pytest.raises(TypeError, match=r"index is 3; give \(epoch, position\), as EpochSampler does"):
        augmented[3]
    with pytest.raises(TypeError, match=r"index is \(0, 3\); give a position"):
        plain[0, 3]


class Keys(Dataset):
    """A data set that gives back what it is asked for."""

    def __init__(self, needs_epoch):
        self.needs_epoch = needs_epoch

    def __len__(self):
        return 23

    def __getitem__(self, key):
        return torch.tensor(key)


class KeysData(DataModule):
    def split(self, name):
        return Keys(needs_epoch=name == "train")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_needs_the_epoch_is_told_it_by_the_sampler(workers):
    data = KeysData(batch_size=4, num_workers=workers)
    loader = data.train_dataloader()
    for epoch in (0, 1, 5):
        loader.sampler.set_epoch(epoch)
        keys = torch.cat(list(loader))
        assert keys[:, 0].tolist() == [epoch] * 23
        assert keys[:, 1].tolist() == list(EpochSampler(range(23), seed=0, epoch=epoch))
    assert torch.cat(list(data.val_dataloader())).tolist() == list(range(23))


def test_the_ranks_share_the_pairs():
    parts = [list(EpochSampler(Keys(True), seed=1, epoch=4, num_replicas=2, rank=rank)) for rank in (0, 1)]
    order = list(EpochSampler(range(23), seed=1, epoch=4))
    shared = [pair for both in zip(*parts, strict=True) for pair in both]
    assert shared == [(4, index) for index in [*order, order[0]]]


# Through the real command line.

MINIATURE = (
    "--config", "rocp/full", "--model.backbone", "resnet18", "--model.weights", "null", "--data.image_size", "32",
    "--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "2",
)  # fmt: skip


def test_the_full_config_parses_without_its_data(fulgurite_cli):
    for overlay in ((), ("--config", "trainer/gpu")):
        outcome = fulgurite_cli("fit", "--config", "rocp/full", *overlay, "--print_config")
        assert outcome.code == 0, outcome.err
        printed = yaml.safe_load(outcome.out)
        assert printed["model"]["init_args"]["backbone"] == "resnet18.a1_in1k"
        assert printed["model"]["init_args"]["weights"] == "hub"
        assert printed["data"]["init_args"]["image_size"] == 224
        assert printed["data"]["init_args"]["classes"] == ["Normal", "Viral Pneumonia", "COVID", "Lung_Opacity"]


def test_the_full_config_without_its_data_says_what_to_fetch(fulgurite_cli):
    outcome = fulgurite_cli("fit", "--config", "rocp/full", "--model.weights", "null")
    assert outcome.code == 2
    assert "full.yaml, line 18, data.root: root is data/COVID-19_Radiography_Dataset; looked in" in outcome.err
    assert "kaggle datasets download tawsifurrahman/covid19-radiography-database --unzip -p data\n" in outcome.err
    assert len(outcome.err.splitlines()) <= 5


def test_the_full_config_trains_tests_and_predicts_on_a_miniature(fulgurite_cli, radiography):
    # Its root is data/COVID-19_Radiography_Dataset in the working folder, where the miniature lies.
    outcome = fulgurite_cli("fit", *MINIATURE, "--data.num_workers", "0")
    assert outcome.code == 0, outcome.err
    best = str(next(Path("runs").rglob("best.ckpt")))
    outcome = fulgurite_cli("test", "--ckpt_path", best)
    assert outcome.code == 0, outcome.err
    (tested,) = (path for path in Path("runs").rglob("results.json") if "/test/" in str(path))
    metrics = yaml.safe_load(tested.read_text())["metrics"]
    assert {"test/accuracy", "test/macro_f1", "test/calibration_error", "test/loss"} <= metrics.keys()
    assert 0 <= metrics["test/accuracy"] <= 1
    assert fulgurite_cli("predict", "--ckpt_path", best).code == 0


def test_a_perceptron_learns_grey_images_from_the_default_root(fulgurite_cli, radiography):
    arguments = (
        "--model", "Classifier", "--model.optimizer", "Adam", "--model.optimizer.lr", "0.01",
        "--data", "ImageFolderHazard", "--data.in_channels", "1", "--data.image_size", "8", "--data.batch_size", "10",
        "--trainer.accelerator", "cpu", "--trainer.max_epochs", "40",
    )  # fmt: skip
    outcome = fulgurite_cli("fit", *arguments)
    assert outcome.code == 0, outcome.err
    assert fulgurite_cli("test", *arguments, "--ckpt_path", "last").code == 0
    (tested,) = (path for path in Path("runs").rglob("results.json") if "/test/" in str(path))
    assert yaml.safe_load(tested.read_text())["metrics"]["test/accuracy"] == 1.0, "the classes differ in brightness"


def test_a_size_that_the_images_determine_is_not_typed_twice(fulgurite_cli, radiography):
    outcome = fulgurite_cli("fit", *MINIATURE, "--model.in_channels", "3")
    assert outcome.code == 2
    assert "model.in_channels: ImageFolderHazard determines in_channels; leave it out" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.in_channels 2", "data.in_channels"),
        ("--data.image_size 0", "command line, data.image_size: image_size is 0; give at least 1 pixel"),
        ("--data.classes [COVID]", "command line, data.classes: classes is ['COVID']; give at least two"),
        ("--data.test_fraction 2", "command line, data.test_fraction: test_fraction is 2.0"),
    ],
)
def test_a_wrong_argument_is_a_short_usage_error(fulgurite_cli, radiography, words, message):
    outcome = fulgurite_cli("fit", *MINIATURE, *words.split())
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_a_damaged_image_ends_the_run_with_a_short_error(fulgurite_cli, radiography):
    data = ImageFolderHazard(root=radiography, classes=["Normal", "Viral Pneumonia", "COVID", "Lung_Opacity"])
    path = data.files[data.split("train").indices[0]]
    path.write_bytes(b"no image")
    outcome = fulgurite_cli("fit", *MINIATURE, "--data.num_workers", "0")
    assert outcome.code == 1
    assert f"{path.name}: this image cannot be read" in outcome.err
    assert len(outcome.err.splitlines()) <= 3
    outcome = fulgurite_cli("fit", *MINIATURE, "--data.num_workers", "0", "--data.skip_unreadable", "true")
    assert outcome.code == 0, outcome.err
    assert "left out 1 of 40 images that cannot be read" in outcome.out


def last(root):
    (path,) = Path(root).rglob("last.ckpt")
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_with_augmentation_is_exact_at_the_end_of_an_epoch_and_in_the_middle(
    fulgurite_cli, radiography, workers, assert_equal_state
):
    checkpoints = "lightning.pytorch.callbacks.ModelCheckpoint"
    base = ("fit", *MINIATURE, "--data.num_workers", str(workers), "--data.batch_size", "5", "--data.image_size", "16")
    base = (*base, "--model.backbone", "mlp", "--trainer.max_epochs", "3", "--trainer.default_root_dir")
    middle = (
        f"--trainer.callbacks+={checkpoints}", "--trainer.callbacks.dirpath=middle",
        "--trainer.callbacks.every_n_train_steps=1", "--trainer.callbacks.save_top_k=-1",
    )  # fmt: skip
    assert fulgurite_cli(*base, "whole", *middle).code == 0
    assert torch.load(last("whole"), weights_only=True)["global_step"] == 3 * 4

    assert fulgurite_cli(*base, "ended", "--trainer.max_epochs", "1").code == 0
    (checkpoint,) = Path("ended").rglob("last.ckpt")
    outcome = fulgurite_cli("fit", "--ckpt_path", str(checkpoint), "--trainer.max_epochs", "3")
    assert outcome.code == 0, outcome.err
    assert_equal_state(last("whole"), last("ended"))

    for step in (2, 5, 8):  # in an epoch, after the first batch of the next, at the end of one
        (checkpoint,) = Path("middle").glob(f"*step={step}.ckpt")
        # The other number of workers: which process reads an image makes no difference.
        outcome = fulgurite_cli(
            "fit", "--ckpt_path", str(checkpoint), "--trainer.callbacks", "null", "--data.num_workers",
            str(2 - workers if step == 5 else workers), "--trainer.default_root_dir", f"from_{step}",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert_equal_state(last("whole"), last(f"from_{step}"))


def test_the_augmentation_enters_the_training(fulgurite_cli, radiography):
    base = ("fit", *MINIATURE, "--data.num_workers", "0", "--model.backbone", "mlp", "--trainer.default_root_dir")
    assert fulgurite_cli(*base, "with").code == 0
    assert fulgurite_cli(*base, "without", "--data.augment", "false").code == 0
    one, other = (torch.load(last(root), weights_only=True)["state_dict"] for root in ("with", "without"))
    assert any(not torch.equal(one[name], other[name]) for name in one)
