"""Prompts for the LongBench tasks in this project's own words, for use without dataset2prompt.json."""

_SEVERAL_TEXTS = (
    "Several texts follow. Put together what they say to answer the question after them in a few words."
    "\n\n{context}\n\nQuestion: {input}\nShort answer:"
)

WORDING: dict[str, str] = {
    "narrativeqa": (
        "A story follows, and then a question about it. Reply in a few words.\n\n"
        "{context}\n\nQuestion: {input}\nShort answer:"
    ),
    "qasper": (
        "A research paper follows, and then a question that needs nothing but the paper. Reply with a short "
        "phrase, or with yes, no or unanswerable.\n\n{context}\n\nQuestion: {input}\nShort answer:"
    ),
    "multifieldqa_en": (
        "Use this document to answer the question after it in a few words.\n\n"
        "{context}\n\nQuestion: {input}\nShort answer:"
    ),
    "multifieldqa_zh": "材料如下，请据此简短作答。\n\n{context}\n\n提问：{input}\n简答：",
    "hotpotqa": _SEVERAL_TEXTS,
    "2wikimqa": _SEVERAL_TEXTS,
    "musique": _SEVERAL_TEXTS,
    "dureader": "下面是几篇网页，读完后回答最后的提问。\n\n{context}\n\n提问：{input}\n答：",
    "gov_report": "Condense this government report into about a page.\n\n{context}\n\nCondensed report:",
    "qmsum": (
        "This is what was said at a meeting. Reply to the request after it in a few sentences.\n\n"
        "{context}\n\nRequest: {input}\nReply:"
    ),
    "multi_news": "These articles cover one event. Retell it in about a page.\n\n{context}\n\nThe event:",
    "vcsum": "请通读这份发言稿，写出要点。\n\n{context}\n\n要点：",
    "trec": "Each question has its type below it. Name the type of the last one.\n\n{context}\n{input}",
    "triviaqa": (
        "Each passage comes with a question and its answer. Answer the last question in the same way.\n\n"
        "{context}\n\n{input}"
    ),
    "samsum": (
        "Each dialogue comes with a short summary. Write the one that is missing at the end.\n\n"
        "{context}\n\n{input}"
    ),
    "lsht": "每条新闻后面都标有类别，请写出最后一条的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Some of these paragraphs occur more than once. Count the different ones and reply with the number "
        "alone.\n\n{context}\n\nDifferent paragraphs:"
    ),
    "passage_retrieval_en": (
        'One of these numbered paragraphs was summarised. Reply with its label, such as "Paragraph 7".\n\n'
        "{context}\n\nSummary: {input}\n\nLabel:"
    ),
    "passage_retrieval_zh": (
        "文末的概要写的是上面哪一段？只写编号，例如“段落7”。\n\n{context}\n\n概要：{input}\n\n编号："
    ),
    "lcc": "This source file breaks off. Write its next line and no more.\n\n{context}Next line:\n",
    "repobench-p": (
        "Here are files of one repository; the last of them breaks off. Write its next line and no more.\n\n"
        "{context}{input}Next line:\n"
    ),
}
