"""What observing is held against."""

from __future__ import annotations

from typing import Any

from bench.results import Claim


def claims_of(rows: dict[str, dict[str, Any]]) -> list[Claim]:
    """The claims of the cases that ran."""
    claims = []
    if "boxes" in rows:
        claims += _of_boxes(rows["boxes"])
    if "fleet" in rows:
        claims += _of_fleet(rows["fleet"])
    if "pages" in rows:
        claims += _of_pages(rows["pages"])
    if "browser" in rows:
        claims += _of_browser(rows["browser"])
    if "links" in rows:
        claims += _of_links(rows["links"])
    return claims


def _of_boxes(row: dict[str, Any]) -> list[Claim]:
    events = row["events"]
    number = sum(events.values())
    return [
        Claim(
            claim="black box: share of a step",
            value=100 * row["share_of_step"],
            unit="%",
            goal="<= 0.5",
            baseline=f"a step of {row['step_s']:.2f} s, {row['layout']}, 8 micro-batches, 2 chunks",
            how=f"{number} events of rank 0's step, each as long as the median of its kind alone",
        ),
    ]


def _of_fleet(row: dict[str, Any]) -> list[Claim]:
    scrape, asked = row["scrape"], row["messages"]
    how = "production service and tables in one process, agents as events; CPU time, medians of 7"
    messages = asked["asked"]
    longest = max(messages, key=lambda name: messages[name]["loop_s"])
    return [
        Claim(
            claim=f"a scrape with a job of {scrape['ranks']} ranks: the loop stands still",
            value=1e3 * scrape["loop_s"],
            unit="ms",
            goal="<= 50",
            baseline=f"{1e3 * scrape['text_s']:.0f} ms of a thread beside it, for the text",
            how=f"{how}; {scrape['bytes']} bytes",
        ),
        Claim(
            claim=f"a message about a job of {asked['ranks']} ranks: the loop stands still",
            value=1e3 * messages[longest]["loop_s"],
            unit="ms",
            goal="<= 20",
            baseline="1,200 ms for a job's message in the first release",
            how=f"{how}; longest turn, of {longest} with {messages[longest]['bytes']} bytes",
        ),
    ]


def _of_pages(row: dict[str, Any]) -> list[Claim]:
    heat, line = row["heat_map"], row["timeline"]
    return [
        Claim(
            claim=f"heat map of {row['ranks']} ranks: a processor of the controller, in threads",
            value=heat["cpu_s"],
            unit="s",
            goal="<= 15",
            baseline=f"{heat['agent_s'] * 1e3:.0f} ms for each rank where it is noted",
            how=f"1,024 rows of 1,000 steps, of {heat['sent_bytes'] / 1e6:.0f} MB from agents; the "
            "page asks again after 100 s",
        ),
        Claim(
            claim=f"heat map of {row['ranks']} ranks: the answer, compressed",
            value=heat["gzip_bytes"] / 1e6,
            unit="MB",
            goal="<= 4",
            baseline=f"{heat['bytes'] / 1e6:.1f} MB of JSON",
            how="1,024 rows of 1,000 steps, seconds and percents; no two ranks take equally long",
        ),
        Claim(
            claim=f"timeline of {line['ranks']} ranks: a processor of the controller, in threads",
            value=line["cpu_s"],
            unit="s",
            goal="<= 1",
            baseline=f"{row['noted_bytes'] * line['ranks'] / 1e6:.0f} MB that they have noted",
            how=f"one step, of {line['sent_bytes'] / 1e6:.1f} MB from agents",
        ),
        Claim(
            claim=f"timeline of {line['ranks']} ranks: the answer, compressed",
            value=line["gzip_bytes"] / 1e6,
            unit="MB",
            goal="<= 0.2",
            baseline=f"{line['bytes'] / 1e6:.1f} MB of JSON",
            how="one step: passes, phases and operations of each rank",
        ),
    ]


def _of_browser(row: dict[str, Any]) -> list[Claim]:
    opened, pan, answers = row["open"], row["pan"], row["answers"]
    what = f"heat map of {row['ranks']} ranks by {row['steps']} steps"
    largest = max(answers, key=lambda name: answers[name]["sent_bytes"])
    return [
        Claim(
            claim=f"{what}: first picture of the map, from the navigation on",
            value=opened["first_s"],
            unit="s",
            goal="<= 1",
            baseline=f"{opened['first_answer_s']:.2f} s of it until ranks of one node in several "
            "are read",
            how="Chromium, headless, without a GPU; until the frame with the map was over; medians "
            "of 3 openings of the page",
        ),
        Claim(
            claim=f"{what}: the map of all ranks, from the navigation on",
            value=opened["whole_s"],
            unit="s",
            goal="<= 10",
            baseline=f"{opened['answer_s']:.1f} s from the request to its first byte, in which "
            "agents answer and the controller puts it together; both answers take "
            f"{opened['server_cpu_s']:.1f} s of processor; {opened['paint_s']:.2f} s from that "
            "byte to the picture",
            how="as above",
        ),
        Claim(
            claim=f"{what}: frames in which it moves",
            value=pan["drawn_per_s"],
            unit="1/s",
            goal=">= 30",
            baseline=f"{pan['frames_per_s']:.0f} frames a second in all, the longest of "
            f"{1e3 * pan['longest_frame_s']:.0f} ms",
            how=f"{pan['moves_per_s']:.0f} moves of the mouse a second, as the browser takes them "
            "in; zoomed in by the wheel, dragged to and fro; times that the map was drawn",
        ),
        Claim(
            claim=f"what pages ask of a job of {row['ranks']} ranks and {row['past_steps']} steps, "
            "besides heat map and timeline: the largest answer, compressed",
            value=answers[largest]["sent_bytes"] / 1e6,
            unit="MB",
            goal="<= 0.2",
            baseline=f"{answers[largest]['bytes'] / 1e6:.1f} MB of JSON",
            how=f"{largest}; of {', '.join(answers)}",
        ),
    ]


def _of_links(row: dict[str, Any]) -> list[Claim]:
    how = "a process on each core computes, as ranks do; median of the last windows of 2 s"
    claims = []
    for node in row["nodes"]:
        what = f"sampling links, {node['links']} of a node"
        claims += [
            Claim(
                claim=f"{what}: share of a core",
                value=100 * node["share_of_core"],
                unit="%",
                goal="<= 1",
                baseline="counters of a real device",
                how=f"CPU time of the agent's thread; {how}",
            ),
            Claim(
                claim=f"{what}: time from one sample to the next",
                value=1e3 * node["interval_s"],
                unit="ms",
                goal="<= 10",
                baseline="counters of a real device",
                how=how,
            ),
        ]
    return claims
