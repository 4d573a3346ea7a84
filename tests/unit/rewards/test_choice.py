import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.choice import ChoiceReward, FormatReward, chosen


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("<reasoning>B or D</reasoning>\n<answer>\nD\n</answer>", "D"),
        ("<answer>A</answer> no, <answer>B</answer>", "B"),
        ("<answer>A or B</answer>", None),
        ("<answer>A</answer> but it may be B", None),  # hedging
        ("<answer>A", None),
        (r"so \boxed{C}", "C"),
        (r"so \boxed{\text{(C)}}", "C"),
        ("The correct answer is (B).", "B"),
        ("Answer: **E**", "E"),
        ("The answer is Apple", None),
        ("A is wrong, so\nC.", "C"),
        ("(A)", "A"),
        ("A cat sat.", None),
        ("<answer>B. Paris</answer>", "B"),
        (r"\boxed{\text{(B) } 12}", "B"),
        (r"\boxed{A \text{ or } B}", None),
        ("<answer>(b)</answer>", "B"),
        (r"\boxed{\text{b}}", "B"),
        ("<answer>a cat</answer>", None),
        (r"\boxed{a, b}", None),
        (r"\boxed{\textbf{(C)}\ 5}", "C"),
        ("The answer is C. Option D is wrong.", "C"),
        ("The answer is B. A decrease in pressure follows.", "B"),
        ("The answer is A, because B is wrong.", "A"),
        ("The answer is A. B is wrong.", "A"),
        ("Answer: C, (D) is not possible", "C"),
        ("Answer: C, D", None),
        ("The answer is A good one.", None),
        ("The answer is C++.", None),
        ('The answer is "C".', "C"),
        ("So, D is correct.", "D"),
        ("C. Paris is the capital.", "C"),
        ("E = mc^2", None),
        ("<think>A</think>\nC", "C"),
        ("<think>The answer is A.</think>\nI do not know.", None),
        ("<think>The answer is A.", None),
        ("答案是 C", "C"),
        ("Answer: A B C D", None),
        ("Answer: A. B. C. D.", None),
        ("Answer: A/B", None),
        ("The answer is (A) or (B).", None),
        ("The answer is not A.", None),
        ("", None),
        # several letters, or a denial, within tags and boxes
        ("<answer>A\nB</answer>", None),
        ("<answer>A.\nB.</answer>", None),
        ("<answer>A; B</answer>", None),
        ("<answer>A (or B)</answer>", None),
        ("<answer>(A), possibly (B)</answer>", None),
        ("<answer>A - B</answer>", None),
        ("<answer>A, possibly B</answer>", None),
        ("<answer>A, otherwise B</answer>", None),
        ("<answer>A as well as B</answer>", None),
        ("<answer>A if not B</answer>", None),
        ("<answer>A is wrong</answer>", None),
        ("<answer>A is not right</answer>", None),
        ("<answer>A: -0.01\nB: 1.69\nC: 2.49\nD: 0.45</answer>", None),
        ("<answer>A. 1.2; B. 1.69; C. 3</answer>", None),
        ("<answer>A or \\boxed{B}</answer>", None),
        ("<answer>The answer is A. The answer is B.</answer>", None),
        ("<answer>Option A. Option B.</answer>", None),
        (r"\boxed{A;B}", None),
        (r"\boxed{A\ B}", None),
        (r"\boxed{A} or \boxed{B}", None),
        (r"\boxed{A}. No, it is \boxed{B}", "B"),
        (r"\boxed{A} and so \boxed{B", None),  # cut off while answering
        # one letter, and the text of its option
        ("<answer>B. Vitamin C</answer>", "B"),
        ("<answer>B: A mixture of A and C</answer>", "B"),
        ("<answer>B because I think so</answer>", "B"),
        ("<answer>B 5 °C</answer>", "B"),
        ("<answer>B 5.53 J</answer>", "B"),
        ("<answer>B: CC1(C(O)C(Cl)C(F)(F)F)CO</answer>", "B"),
        ("<answer>B CC1(C(O)C(Cl)C(F)(F)F)CO</answer>", "B"),
        # other forms of one letter
        ("<answer>Option B</answer>", "B"),
        ("<answer>The answer is B</answer>", "B"),
        ("<answer>The correct answer is: (B) 1.69</answer>", "B"),
        (r"<answer>\boxed{B}</answer>", "B"),
        (r"<answer>$\boxed{B}$</answer>", "B"),
        (r"\boxed{\text{Option B}}", "B"),
        ("<answer>B</answer>.", "B"),
        ("```\n<answer>B</answer>\n```", "B"),
        ("The correct answer is therefore B.", "B"),
        ("The correct answer is most likely B", "B"),
        ("The answer is A, possibly B.", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert chosen(text) == letter


def test_rewards():
    prompts = [Prompt(0, (1,), "", answer) for answer in ("D", "(D)", "d", "D", "")]
    scores = ChoiceReward()(prompts, ["<answer>D</answer>"] * 3 + ["<answer>A</answer>", "D"])
    assert [score.reward for score in scores] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert scores[3].reason == "A is wrong" and "names no option" in scores[4].error
    (score,) = ChoiceReward()([Prompt(0, (1,), "", "2")], ["The answer is C."])
    assert score.error == "the reference '2' names no option", "the number of an option, as MMLU's rows have it"


def test_format():
    reward = FormatReward(["think", "answer"])
    texts = [
        "<think>a</think>\n<answer>b</answer>\n",
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer>b",
        "<think>a</think> so <answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<" * 100_000,
    ]
    assert [s.reward for s in reward([Prompt(0, (1,), "", "")] * 6, texts)] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["The answer is B (or C).", "The answer is B unless C", "B (C)", "The answer is B if C is not"]
)
def test_a_hedged_letter_is_no_choice(text):
    assert chosen(text) is None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think></think><answer></answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
    ],
)
def test_each_section_stands_once_with_content(text, right):
    (score,) = FormatReward(["think", "answer"])([Prompt(0, (1,), "", "")], [text])
    assert score.reward == right


def test_a_thought_that_the_chat_template_has_opened():
    opened = [Prompt(0, (1,), "", "B", opened=True)] * 3
    texts = ["The answer is B", "It may be A.</think><answer>B</answer>", "<think>A</think><answer>B</answer>"]
    for reward in (ChoiceReward(), FormatReward(["think", "answer"])):
        assert [score.reward for score in reward(opened, texts)] == [0.0, 1.0, 1.0]
    assert ChoiceReward().answer(opened[0], texts[0]) is None
