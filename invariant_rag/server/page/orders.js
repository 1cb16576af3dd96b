/** Orders of documents, and answers in several of them compared. Nothing here touches the page. */

/** Return a source of numbers from 0 to 1 (mulberry32): the same clicks try the same orders. */
export function seeded(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** Return up to `count` random orders that differ from each other and from those in `taken`. */
export function otherOrders(order, count, taken, random) {
  const known = new Set(taken.map(String));
  const found = [];
  for (let tries = 0; found.length < count && tries < 200; tries += 1) {
    const drawn = shuffled(order, random);
    if (!known.has(String(drawn))) {
      known.add(String(drawn));
      found.push(drawn);
    }
  }
  return found;
}

/** Return a history with an entry more; an order that was asked before keeps its place. */
export function recorded(history, entry) {
  const place = history.findIndex((each) => String(each.order) === String(entry.order));
  return place < 0 ? [...history, entry] : history.with(place, entry);
}

/** Return what two answers share if they agree: the text without regard to case and white space. */
export function answerKey(text) {
  return text.split(/\s+/).filter(Boolean).join(" ").toLowerCase();
}

/** Return the first answer of a reading ("plain" or "invariant") in a history. */
export function firstAnswer(history, reading) {
  return history.map((entry) => entry[reading]).find((answer) => answer?.text !== undefined);
}

/** Return whether an answer differs from the first one. */
export function isFlipped(answer, first) {
  return answer?.text !== undefined && answerKey(answer.text) !== answerKey(first.text);
}

/** Return how many orders were asked after the first one, and in how many of them the answer was another. */
export function flips(history, reading) {
  const first = firstAnswer(history, reading);
  const answers = history.map((entry) => entry[reading]).filter((answer) => answer?.text !== undefined);
  const flipped = answers.filter((answer) => isFlipped(answer, first)).length;
  return { others: Math.max(answers.length - 1, 0), flipped };
}

function shuffled(order, random) {
  const drawn = [...order];
  for (let last = drawn.length - 1; last > 0; last -= 1) {
    const other = Math.floor(random() * (last + 1));
    [drawn[last], drawn[other]] = [drawn[other], drawn[last]];
  }
  return drawn;
}
