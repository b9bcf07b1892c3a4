"""What the benchmark prints for people."""

from headrace.recipe.bench import lines


def test_parts_of_a_figure_have_lines_of_their_own():
    assert [line.split() for line in lines({"render_us": 1.5, "goals": {"stream_us": 15.0, "refusal_us": 3}})] == [
        ["render_us", "1.5"],
        ["goals"],
        ["stream_us", "15.0"],
        ["refusal_us", "3"],
    ]


def test_goals_without_the_official_wheel_are_not_judged_and_that_is_said():
    (said,) = lines({"goals_met": None})
    assert said == "goals were not judged: the official wheel is not installed (pip install deepseek-recipe)"
    assert lines({"goals_met": True})[0].split() == ["goals_met", "True"]
