# ruff: noqa: E501 (a table of texts, a paragraph a line)
"""Worked questions for the brief. Everything in them is invented, so that no data set can hold them."""

from __future__ import annotations

from whale_tui.domains.bm25 import Passages
from whale_tui.records import Demonstration

WORKED: tuple[tuple[str, str, str, str], ...] = (
    (
        "Brennoch Viaduct",
        "The Brennoch Viaduct carries the coastal railway across the mouth of the Tarrel. It was drawn by the engineer Isla Corvane, who had lost an earlier bridge to a spring flood, and was opened to goods trains in 1887. Passengers had to wait another two years. Its nineteen arches are of grey slate, and the middle one is left open for the salmon boats.",
        "Which engineer drew the Brennoch Viaduct after losing an earlier bridge?",
        "Isla Corvane",
    ),
    (
        "Quillet fever",
        "Quillet fever is a mild illness of sheep and, rarely, of shepherds. It is passed on by the brown upland tick and lasts about nine days. In the damp summer of 1931 more than forty thousand animals fell ill in the Oskar valleys alone. Since then flocks have been dipped in a bath of juniper oil, which the ticks avoid.",
        "How long does the fever last that the brown upland tick passes on?",
        "about nine days",
    ),
    (
        "Municipal Orchestra of Vessen",
        "The Municipal Orchestra of Vessen was founded by dock workers, who paid for the first instruments with a tax on tobacco. It has sixty-two players today. For most of its history it had no hall and played in the fish market, where the audience stood. Its longest-serving conductor, Petra Haldun, refused to give any concert without a waltz.",
        "In which place was it that the orchestra played while it had no hall?",
        "in the fish market",
    ),
    (
        "Lake Ammerin",
        "Lake Ammerin lies in a crater at a height of 2,140 metres and has no outlet. Its water is coloured green by a copper vein in the northern wall, and nothing lives in it but a small blind shrimp. Herders once believed that the lake rang before a storm. The sound is now put down to ice that cracks along the shore.",
        "What gives Lake Ammerin its green colour?",
        "a copper vein",
    ),
    (
        "Treaty of Two Bridges",
        "The Treaty of Two Bridges ended the salt war between Harn and the upper towns. It was signed in October 1612 on a raft in the middle of the river, since neither side would set foot on the other's bank. Harn gave up its toll on salt, and received the forest of Old Linden in return. The raft is kept in the town hall of Merrow.",
        "What did Harn receive for giving up its toll?",
        "the forest of Old Linden",
    ),
    (
        "Doru Kestrin",
        "Doru Kestrin was a maker of clocks and, in his later years, a collector of moths. He was born in Palt as the seventh child of a baker. His tide clock, which shows high water for eleven harbours, still runs in the customs house of Ebbery. He left his collection of some three thousand moths to a school for girls.",
        "How many harbours does the tide clock show?",
        "eleven",
    ),
    (
        "Sorrel glass",
        "Sorrel glass is a red glass that was blown on the island of Fenna from sand, ash and powdered brick. The recipe was kept by a single family, the Ostrands, and was lost when their workshop burned in 1744. Chemists have since shown that the colour comes from iron. About two hundred pieces are known, most of them bowls for sugar.",
        "Which family kept the recipe of sorrel glass?",
        "the Ostrands",
    ),
    (
        "Night Mail of Corrin",
        "The Night Mail of Corrin was a sledge service that ran every winter until the tunnel was dug. Two drivers and fourteen dogs covered the 88 kilometres between Corrin and the lowland station in nine hours. Letters were carried free, while parcels cost a penny a pound. The last sledge set out on 3 March 1926 with the mayor on board.",
        "What is the distance between Corrin and the lowland station?",
        "88 kilometres",
    ),
    (
        "Grey-necked lark",
        "The grey-necked lark breeds on stony ground above the tree line. The female lays three eggs in a hollow that she lines with lichen, and the male sings only while he hovers. In autumn the birds move down to the barley fields of the Senna plain, where they live on spilt grain. They were first described by the surveyor Nils Abery.",
        "What does the female lark line the hollow with?",
        "lichen",
    ),
    (
        "Tollhouse Players",
        "The Tollhouse Players are an amateur theatre in Wick Arden that gives its plays by candlelight. They began in 1958, when the road toll was dropped and the keeper offered his empty house for a Christmas comedy. Every play is chosen by lot from a hat. Since a small fire in the second season, the front row is given a bucket of sand.",
        "How is every play of the Tollhouse Players chosen?",
        "by lot",
    ),
    (
        "Marl steel",
        "Marl steel is made by folding a soft and a hard steel together with crushed shell between them. The method comes from the smiths of Dunmarl, who needed sickles that would keep an edge in wet reed. A blade is folded twelve times and then buried in river mud for a month. It rusts easily and has to be rubbed with goose fat.",
        "How often is a blade folded before it is buried in river mud?",
        "twelve times",
    ),
    (
        "Observatory of Saint Orla",
        "The Observatory of Saint Orla stands on a lighthouse rock and was built for the study of comets. Its first telescope was a gift of the herring fleet. In 1903 the astronomer Judit Maro found there a comet that returns every fourteen years and is named after her dog, Pipkin. The dome was closed when the harbour lamps became too bright.",
        "After whom is the comet named that Judit Maro found?",
        "her dog",
    ),
)
"""Title, paragraph, question, and the answer as the paragraph has it."""


def demonstrations() -> list[Demonstration]:
    """Each question with what a search for it finds among these paragraphs alone."""
    index = Passages((title, text) for title, text, _, _ in WORKED)
    shown = []
    for _, _, question, answer in WORKED:
        use = {"name": "search", "args": {"query": question, "k": 3}, "result": index.search(question, 3)}
        shown.append(Demonstration({"question": question}, [use], answer))
    return shown
