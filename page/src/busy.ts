// A sign while the page computes: what it does, and how much of that is done.
import { h } from "./dom";

/** What is done sooner needs no sign, in milliseconds. */
const LONG = 120;

/** When a frame was shown; in a page that nobody sees, a moment later. */
const shown = () => new Promise<void>((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 100); });

export class Busy {
  private words = h("span", {}, "");
  private bar = h("progress", { max: 1, "aria-label": "Done" });
  private element = h("div", { class: "busy", role: "status", hidden: true }, this.words, this.bar);
  private since = performance.now();
  constructor(place: HTMLElement) { place.append(this.element); }
  /** What is done now, and its share; lets the browser show it, where something has taken long. */
  async say(words: string, share: number) {
    if (performance.now() - this.since < LONG) return;
    this.element.hidden = false;
    this.words.textContent = `${words}: ${Math.round(share * 100)} %`;
    this.bar.value = share;
    await shown();
    this.since = performance.now();
  }
  done() { this.element.remove(); }
}
