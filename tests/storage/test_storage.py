import pytest

from fulgurite.storage import atomic_path, point_link, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "deep" / "file.txt"
    write_text(file, "first")

    def write_half():
        with atomic_path(file) as temporary:
            temporary.write_text("half of the sec")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_half()
    assert file.read_text() == "first"
    assert list(file.parent.iterdir()) == [file], "nothing temporary is left"


def test_the_temporary_file_keeps_the_suffix_and_the_usual_rights(tmp_path):
    with atomic_path(tmp_path / "figure.png") as temporary:
        assert temporary.suffix == ".png"
        temporary.write_bytes(b"x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "figure.png").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_is_pointed_elsewhere_in_one_step(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        point_link(tmp_path / "latest", name)
        assert (tmp_path / "latest").resolve() == (tmp_path / name).resolve()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "latest"}
