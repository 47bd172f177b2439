// Where `gputrace serve` shows the page, an address in the search is looked up in the trace: every owner that it had (`gputrace who`).
import type { Section } from "./data";
import { h } from "./dom";
import { section } from "./tables";
import type { View } from "./view";

/** So long nothing is typed before it is asked, in milliseconds. */
const REST = 400;

/** The digits of an address as CUDA's errors name it; null for every other text. */
export function address(text: string): string | null {
  return /^\s*0x([0-9a-f]{4,16})\s*$/i.exec(text)?.[1].toLowerCase() ?? null;
}

export class Owners {
  readonly element = h("div", { "aria-live": "polite" });
  private isServed = document.querySelector("meta[name=gputrace-details]") !== null;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private asked = "";
  constructor(private view: View) {
    if (this.isServed) view.on(() => this.look());
  }
  private look() {
    const digits = address(this.view.search.text), question = digits === null ? "" : `who?trace=${this.view.chapter}&address=${digits}`;
    if (question === this.asked) return;
    this.asked = question;
    if (this.timer) clearTimeout(this.timer);
    this.element.replaceChildren();
    if (question) this.timer = setTimeout(() => void this.ask(question), REST);
  }
  private async ask(question: string) {
    const show = (shown: HTMLElement) => { if (question === this.asked) this.element.replaceChildren(shown); };
    show(h("p", { class: "note" }, "looking for the owners of this address\u2026"));
    try {
      const response = await fetch(question);
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      show(section((await response.json()) as Section, null));
    } catch (error) {
      show(h("p", { class: "note" }, `the owners of this address are not known: ${String((error as Error).message)}`));
    }
  }
}
