(() => {
    const found = [], box = (one) => one.getBoundingClientRect();
    const meet = (a, b) => a.left < b.right - 2 && b.left < a.right - 2
        && a.top < b.bottom - 2 && b.top < a.bottom - 2;
    for (const plot of document.querySelectorAll(".card > svg")) {
        const name = plot.closest("article").innerText;
        const say = (...what) => found.push([name, ...what].join(" | "));
        const room = box(plot);
        if (box(plot.parentElement).width - room.width > 40) say(room.width);
        const texts = [...plot.querySelectorAll("text")].filter((one) => box(one).width);
        texts.forEach((one, i) => {
            const others = texts.slice(i + 1).filter((other) => meet(box(one), box(other)));
            for (const other of others) say(one.textContent, other.textContent);
            const isCut = box(one).left < room.left - 2 || box(one).right > room.right + 2;
            if (isCut) say(one.textContent);
        });
    }
    return found;
})()
